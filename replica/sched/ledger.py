"""The ledger admits: granted, later (with a reason), or never (with the error to say).

Blocks for decoding to come are reserved by the peak formula (LightLLM): sort by remaining length,
and take the largest need at any moment when one of the requests ends. Remaining lengths are learnt;
where they were wrong it is preemption that makes room. That can't go back and forth: what a request
gave up is taken by one ahead of it, so it finds its blocks again only after one of those has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import Batching
from events.errors import CoreError
from replica.engine.messages import EngineRequest
from replica.sched.lengths import OutputLengths, Rest
from replica.sched.refusals import bad_request, too_long
from replica.sched.request import Request

HORIZON_TOKENS = 64
HEADROOM_SHARE = 64
"""One block in so many stays free when a newcomer is let in beside others, for emergencies."""

MAX_PREFILLS = 16
MAX_LOADS = 8


@dataclass(frozen=True, slots=True)
class Granted:
    """Everything that it needs is there."""


@dataclass(frozen=True, slots=True)
class Later:
    """Not in this step. `reason` is one of a few words, for the counters."""

    reason: str


@dataclass(frozen=True, slots=True)
class Never:
    """It can't run here, whatever happens."""

    error: CoreError


Answer = Granted | Later | Never


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica can hold, how much it lets wait, and how far a newcomer looks ahead.

    `itl_target_ms`: while others decode, a step computes only as much prefill as lets it end by
    then; 0 leaves it to `max_step_tokens`. `max_prefills`: prompts that are computed by turns.
    `max_loads`: requests that wait for blocks from below at once.
    `horizon_tokens`: how much of an answer is reserved before any lengths were learnt.
    `retract_every_steps`: for tests, somebody loses its KV every so many plans. `batching`: see
    ReplicaConfig.
    """

    total_blocks: int
    block_tokens: int
    context_tokens: int
    max_running: int
    max_step_tokens: int
    max_waiting_tokens: int
    horizon_tokens: int = HORIZON_TOKENS
    itl_target_ms: float = 0.0
    max_prefills: int = MAX_PREFILLS
    max_loads: int = MAX_LOADS
    retract_every_steps: int = 0
    batching: Batching = "continuous"

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


class Ledger:
    """Answers for one replica's limits: seats, prompts by turns, blocks now and for what is to
    come, loads from below. What an answer has to fit is compiled before its request comes here.

    `usable_blocks` is the pool less what is parked; `never` counts refusals by their code.
    """

    def __init__(self, limits: Limits, lengths: OutputLengths) -> None:
        self.limits = limits
        self.lengths = lengths
        self.usable_blocks = limits.total_blocks
        self.never: Counter[str] = Counter()

    @property
    def pool_tokens(self) -> int:
        """Tokens that the usable pool holds."""
        return self.usable_blocks * self.limits.block_tokens

    def intake(self, spec: EngineRequest) -> Never | None:
        """Whether the request could run at all, were it alone."""
        limits, prompt, wanted = self.limits, len(spec.prompt), spec.params.max_tokens
        if prompt == 0 or wanted <= len(spec.output):
            return self._never(
                bad_request("a request needs a prompt and at least one token to generate")
            )
        if len(spec.chain) > prompt // limits.block_tokens:
            return self._never(
                bad_request("the prompt has fewer full blocks than its chain has keys")
            )
        if prompt + wanted > limits.context_tokens:
            return self._never(
                too_long(
                    f"This model's maximum context length is {limits.context_tokens} tokens. "
                    f"However, you requested {prompt + wanted} tokens ({prompt} in the messages, "
                    f"{wanted} in the completion). Please reduce the length of the messages or "
                    "completion."
                )
            )
        if spec.known_tokens + 1 > self.pool_tokens:
            return self._never(
                too_long(
                    f"The request has {spec.known_tokens} tokens, but this replica's KV pool "
                    f"holds {self.pool_tokens} in all."
                )
            )
        return None

    def admit(
        self, candidate: Request, hit_blocks: int, running: Sequence[Request], available: int
    ) -> Answer:
        """Whether `candidate` may start. Its `hit_blocks` are locked: not part of `available`."""
        limits = self.limits
        known = len(candidate.tokens)
        if limits.blocks(known) > self.usable_blocks:
            return self.outgrown(candidate)
        if len(running) >= limits.max_running:
            return Later("seats")
        if limits.batching == "static" and any(each.generated for each in running):
            return Later("batch")
        if self.turns(running) >= limits.max_prefills:
            return Later("prefills")
        if limits.blocks(known) - hit_blocks > available:
            return Later("blocks")
        headroom = self.usable_blocks // HEADROOM_SHARE
        if running and self._peak(candidate, hit_blocks, running) + headroom > available:
            return Later("headroom")
        return Granted()

    def load(self, under_way: int) -> Answer:
        """Whether one more load may begin beside so many: each holds blocks without computing."""
        return Granted() if under_way < self.limits.max_loads else Later("transfers")

    @staticmethod
    def turns(running: Sequence[Request]) -> int:
        """Prompts that are computed by turns now."""
        return sum(request.debt > 1 for request in running)

    def outgrown(self, request: Request) -> Never:
        """The answer for a request that is alone and still finds no block for its next token."""
        return self._never(
            too_long(
                f"The request reached {len(request.tokens)} tokens, but this replica's KV pool "
                f"holds {self.pool_tokens} in all."
            )
        )

    def _never(self, error: CoreError) -> Never:
        self.never[str(error.code)] += 1
        return Never(error)

    def _peak(self, candidate: Request, hit_blocks: int, running: Sequence[Request]) -> int:
        """The most blocks that will be needed at once, if answers end when they are believed to."""
        block_tokens = self.limits.block_tokens
        entries = [(self.lengths.rest(each), each, len(each.blocks)) for each in running]
        # Who ends earlier than an entry has returned by then what it holds beyond its prefix.
        returned = sum(self._returns(*entry) for entry in entries)
        entries.append((self.lengths.rest(candidate), candidate, hit_blocks))
        entries.sort(key=lambda entry: -entry[0].tokens)
        peak = missing_tokens = 0
        for alive, (rest, request, held) in enumerate(entries, 1):
            if request is not candidate:
                returned -= self._returns(rest, request, held)
            missing_tokens += len(request.tokens) + block_tokens - 1 - held * block_tokens
            needed = (missing_tokens + alive * rest.tokens) // block_tokens
            peak = max(peak, needed - returned)
        return peak

    def _returns(self, rest: Rest, request: Request, held: int) -> int:
        """Blocks that a running request gives back when it ends, if that is in sight."""
        if not rest.ends:
            return 0
        return max(0, held - request.cached_tokens // self.limits.block_tokens)
