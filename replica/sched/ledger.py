"""The ledger admits: granted, later (with a reason), or never (with the error to say).

Blocks for decoding to come are reserved by the peak formula (LightLLM): sort by remaining length,
and take the largest need at any moment when one of the requests ends. Remaining lengths are learnt;
where they were wrong it is preemption that makes room. That can't go back and forth: what a request
gave up is taken by one ahead of it, so it finds its blocks again only after one of those has ended.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import Batching
from events.errors import CoreError
from replica.engine.messages import EngineRequest
from replica.sched.lengths import OutputLengths
from replica.sched.refusals import bad_request, too_long
from replica.sched.request import Request
from replica.sched.seats import Need, Seats, need_of

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
    ReplicaConfig. `max_adapters` are in memory at once, `max_adapters_per_batch` in use.
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
    max_adapters: int = 1
    max_adapters_per_batch: int = 1

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


class Ledger:
    """Answers for one replica's limits: seats, prompts by turns, blocks now and for what is to
    come, loads from below, adapters in use. What an answer has to fit is compiled before its
    request comes here.

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

    def seats(self, requests: Sequence[Request]) -> Seats:
        """These as they are now."""
        return Seats(requests, self.lengths, self.limits.block_tokens)

    def door(self, candidate: Request, seats: Seats) -> Answer:
        """Whether `candidate` could start, had it all the blocks that it needs."""
        limits = self.limits
        if limits.blocks(len(candidate.tokens)) > self.usable_blocks:
            return self.outgrown(candidate)
        if len(seats) >= limits.max_running:
            return Later("seats")
        if limits.batching == "static" and any(each.generated for each in seats.requests):
            return Later("batch")
        if seats.turns >= limits.max_prefills:
            return Later("prefills")
        return Granted()

    def room(self, candidate: Request, hit_blocks: int, seats: Seats, available: int) -> Answer:
        """Whether there are blocks for one whom the door lets in. Its `hit_blocks` are locked: not
        part of `available`."""
        if self.limits.blocks(len(candidate.tokens)) - hit_blocks > available:
            return Later("blocks")
        if seats.requests and not self._fits(candidate, hit_blocks, seats, available):
            return Later("headroom")
        return Granted()

    def load(self, under_way: int) -> Answer:
        """Whether one more load may begin beside so many: each holds blocks without computing."""
        return Granted() if under_way < self.limits.max_loads else Later("transfers")

    def adapter(self, in_use: int, used: bool) -> Answer:
        """Whether one more request may compute with its adapter, beside so many different ones in
        use; `used`: its own is among them."""
        fits = used or in_use < min(self.limits.max_adapters, self.limits.max_adapters_per_batch)
        return Granted() if fits else Later("adapter")

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

    def _fits(self, candidate: Request, hit_blocks: int, seats: Seats, available: int) -> bool:
        """Whether nobody will be short of blocks, some being left for emergencies."""
        available -= self.usable_blocks // HEADROOM_SHARE
        block_tokens = self.limits.block_tokens
        need = need_of(candidate, hit_blocks, hit_blocks, self.lengths, block_tokens)
        most = seats.most_tokens + max(0, need.missing_tokens) + need.rest_tokens
        # Where there is room for all at their longest there is room at any time before.
        return most // block_tokens <= available or self._peak(need, seats) <= available

    def _peak(self, candidate: Need, seats: Seats) -> int:
        """The most blocks that will be needed at once, if answers end when they are believed to."""
        needs = list(seats.needs)
        # Who ends earlier than another has returned by then what it holds beyond its prefix.
        returned = sum(need.returned_blocks for need in needs)
        insort(needs, candidate, key=lambda need: -need.rest_tokens)
        peak = missing_tokens = 0
        for alive, need in enumerate(needs, 1):
            returned -= need.returned_blocks
            missing_tokens += need.missing_tokens
            needed = (missing_tokens + alive * need.rest_tokens) // self.limits.block_tokens
            peak = max(peak, needed - returned)
        return peak
