"""One request as it is placed, and what one attempt has to do of it."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from configs.schema import WARM_SHARE
from events.request import ChildProgress, SamplingParams
from kvstore.identity import KeyChain
from router.choice.route import HandOff, RouteQuery

LEAST_TIMEOUT_S = 1.0
LEAST_DEADLINE_MS = 1.0
UNREAD = KeyChain(b"", b"")


class Job(Struct, frozen=True, kw_only=True):
    """One request, ready to be placed: ids, keys and limits; the same for all its attempts.

    `prompt` is u32 little endian; `chain` its keys in the namespace of `pool`. Without a
    `ttft_deadline_ms` of its own the first token is due by `first_token_timeout_s`. `write_to`: no
    answer is wanted, only the prompt's blocks in that store. `adapter`: as of CoreRequest.
    `others`: the same request as each other pool of the revision takes it.
    """

    request_id: str
    tenant: str
    salt: bytes
    model: str
    pool: str
    block_tokens: int
    prompt: bytes
    chain: KeyChain
    sampling: SamplingParams
    first_token_timeout_s: float
    timeout_s: float
    public_cut_blocks: int = 0
    pin: str | None = None
    priority: int = 0
    weight: float = 1.0
    ttft_deadline_ms: float | None = None
    itl_deadline_ms: float | None = None
    write_to: str = ""
    warm_share: float = WARM_SHARE
    adapter: tuple[str, str] | None = None
    others: tuple[Job, ...] = ()

    def ttft_due_ms(self, leg: Leg) -> float:
        """Until when the first token is of use, from the start of an attempt. Whoever has read the
        head of an answer is better served late than never."""
        limit_ms = 1000 * leg.first_token_s
        if leg.progress or self.ttft_deadline_ms is None:
            return limit_ms
        spent_ms = 0.0 if leg.hand_off is None else leg.hand_off.took_ms
        return min(limit_ms, max(LEAST_DEADLINE_MS, self.ttft_deadline_ms - spent_ms))

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // 4

    @property
    def scores_prompt(self) -> bool:
        """Whether each token of the prompt is scored: all of it is computed, whatever is cached."""
        return self.sampling.prompt_logprobs is not None

    def after(self, waited_s: float) -> Job:
        """The same with what is left of its deadlines."""
        if not waited_s:
            return self
        return replace(
            self,
            first_token_timeout_s=max(LEAST_TIMEOUT_S, self.first_token_timeout_s - waited_s),
            timeout_s=max(LEAST_TIMEOUT_S, self.timeout_s - waited_s),
            ttft_deadline_ms=(
                None
                if self.ttft_deadline_ms is None
                else max(LEAST_DEADLINE_MS, self.ttft_deadline_ms - 1000 * waited_s)
            ),
        )

    def expected_tokens(self, answer_tokens: int) -> int:
        """Prompt and answers, each of `answer_tokens` or of as many as it may have."""
        sampling = self.sampling
        return len(self.prompt) // 4 + sampling.n * min(sampling.max_tokens, answer_tokens)

    def first_leg(self) -> Leg:
        """The first attempt."""
        return Leg(
            attempt=1,
            failed=frozenset(),
            progress=(),
            first_token_s=self.first_token_timeout_s,
            left_s=self.timeout_s,
        )

    def query(self, leg: Leg, unable: frozenset[str] = frozenset()) -> RouteQuery:
        """What the chooser is asked: anybody but who failed or is `unable`. Tokens that were
        delivered already are prompt by now, and by then the prompt has been scored."""
        carried_tokens = leg.carried_tokens if leg.progress else 0
        unread = self.sampling.prompt_logprobs is not None and not carried_tokens
        return RouteQuery(
            request_id=self.request_id,
            attempt=leg.attempt,
            tenant=self.tenant,
            pool=self.pool,
            chain=UNREAD if unread else self.chain,
            prompt_tokens=len(self.prompt) // 4 + carried_tokens,
            max_tokens=self.sampling.n * self.sampling.max_tokens - carried_tokens,
            block_tokens=self.block_tokens,
            ttft_deadline_ms=self.ttft_due_ms(leg),
            itl_deadline_ms=self.itl_deadline_ms,
            priority=self.priority,
            exclude=unable | leg.failed,
            pin=self.pin,
            public_cut_blocks=self.public_cut_blocks,
            computes=bool(self.write_to),
            hand_off=leg.hand_off,
            adapter=self.adapter,
        )


class Leg(Struct, frozen=True, kw_only=True):
    """One attempt's part of a request: its number, who failed before, where to go on from, what is
    left of the time for its first token and for everything, and what was computed for it before."""

    attempt: int
    failed: frozenset[str]
    progress: tuple[ChildProgress, ...]
    first_token_s: float
    left_s: float
    hand_off: HandOff | None = None

    @property
    def carried_tokens(self) -> int:
        """Tokens that were delivered before, of all children."""
        return sum(map(self.carried, range(len(self.progress)))) if self.progress else 0

    def carried(self, child: int) -> int:
        """Tokens of one child that were delivered before."""
        return len(self.progress[child].output) // 4 if self.progress else 0

    def open_children(self, n: int) -> list[int]:
        """The children that this attempt has to answer."""
        return [i for i in range(n) if not (self.progress and self.progress[i].finished)]
