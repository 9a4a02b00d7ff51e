"""One attempt of one request: decided and reserved, sent, its deltas taken, its end reported once.

Between the choice, its reservation and the frame in the link's outbox there is no await. `finish`
is the only release; every exit path leads there, and only its first call counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from configs.schema import WARM_SHARE
from events.decision import RouteDecision
from events.errors import CoreError, UserError
from events.grammar import GRAMMAR
from events.output import CLEAN_FINISHES, CoreDelta, Usage
from events.request import ChildProgress, CoreRequest, SamplingParams
from kvstore.identity import KeyChain
from router.backends.attempt import ForeignAttempt
from router.choice.route import Chooser, HandOff, NoReplica, Outcome, RouteQuery
from router.dispatch.links import Links
from router.dispatch.sink import AttemptSink, Direct, SinkLimits
from router.errors import AttemptError, finish_failure, transport_failure

NOTHING = Usage(0, 0, 0)
LEAST_TIMEOUT_S = 1.0
LEAST_DEADLINE_MS = 1.0


class Job(Struct, frozen=True, kw_only=True):
    """One request, ready to be placed: ids, keys and limits; the same for all its attempts.

    `prompt` is u32 little endian; `chain` its keys in the namespace of `pool`. Without a
    `ttft_deadline_ms` of its own the first token is due by `first_token_timeout_s`. `write_to`: no
    answer is wanted, only the prompt's blocks in that store. `adapter`: as of CoreRequest.
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
        return self.prompt_tokens + self.sampling.n * min(self.sampling.max_tokens, answer_tokens)

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
        delivered already are prompt by now."""
        return RouteQuery(
            request_id=self.request_id,
            attempt=leg.attempt,
            tenant=self.tenant,
            pool=self.pool,
            chain=self.chain,
            prompt_tokens=self.prompt_tokens + leg.carried_tokens,
            max_tokens=self.sampling.n * self.sampling.max_tokens - leg.carried_tokens,
            block_tokens=self.block_tokens,
            ttft_deadline_ms=self.ttft_due_ms(leg),
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


class RouteListener(Protocol):
    """Who wants to know: metrics and the bus. Called on the event loop; must not block or raise."""

    def decided(self, decision: RouteDecision) -> None:
        """A replica was chosen and reserved."""

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        """A replica was chosen to go on behind tokens that were delivered already."""

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """An attempt ended; once per decision."""


def unavailable(answer: NoReplica) -> UserError:
    """Nobody can take the request: too long for every replica, too late, or just now."""
    if answer.reason == "too_long":
        message = "no replica has room for a prompt and answer of this length"
        return UserError(CoreError(status=400, message=message, code="context_length_exceeded"))
    late = answer.reason == "deadline"
    return UserError(
        CoreError(
            status=429 if late else 503,
            message="every replica is too busy" if late else answer.reason,
            type="server_error",
            code="overloaded" if late else "no_replica",
            retry_after_s=max(1.0, answer.retry_after_s),
        )
    )


class Attempt:
    """A decision on its way. Made by the dispatcher with the reservation already taken.

    `heard_s`: when the replica was last heard on this attempt; `usage`: the newest of each child.
    """

    def __init__(
        self,
        job: Job,
        leg: Leg,
        decision: RouteDecision,
        dispatcher: Dispatcher,
        limits: SinkLimits,
    ) -> None:
        self.decision = decision
        self._job = job
        self._leg = leg
        self._dispatcher = dispatcher
        self._link = dispatcher.links.get(decision.replica)
        self._sink: AttemptSink | None = None
        self._limits = limits
        self._started_s = time.monotonic()
        self._ttft_ms: float | None = None
        self.heard_s = self._started_s
        self.usage: dict[int, Usage] = {}
        self._finished = False
        self.answered = False

    @property
    def finished(self) -> bool:
        """Whether the end was reported."""
        return self._finished

    @property
    def continuable(self) -> bool:
        """Whether another replica could go on where this one broke off: its deltas carry ids."""
        return self._link is not None and self._link.continues

    @property
    def silent_s(self) -> float:
        """Seconds since the replica was last heard on this attempt."""
        return time.monotonic() - self.heard_s

    def send(self) -> None:
        """Register the sink and post the request. Raises AttemptError."""
        if self._link is None:
            raise transport_failure("the replica is not connected")
        key = (self._job.request_id, self.decision.attempt)
        children = self._leg.open_children(self._job.sampling.n)
        sink = AttemptSink(key, children, self._limits, self._link.control)
        self._link.submit(self._core_request(), sink)
        self._sink = sink

    async def take(
        self, direct: Direct | None = None, until_s: float | None = None
    ) -> tuple[CoreDelta, ...]:
        """The next deltas that did not go to `direct`, as the first never does; what goes there is
        for its owner to note in `heard_s` and `usage`. Reports the first token and the end by
        itself. Raises AttemptError, and TimeoutError where nothing came until `until_s` (of the
        loop's time)."""
        assert self._sink is not None
        begun = self._ttft_ms is not None
        batch = await self._sink.take(direct if begun else None, until_s)
        self.heard_s = time.monotonic()
        for delta in batch:
            if delta.finish is not None and delta.finish.reason not in CLEAN_FINISHES:
                raise finish_failure(delta.finish.reason, delta.finish.error)
            self.usage[delta.child] = delta.usage
        self._report_first_token(batch[0].usage)
        if self._sink.answered:
            self.answered = True
            self.finish("ok")
        return batch

    def fail(self, failure: AttemptError) -> None:
        """Report an end that is not an answer."""
        status = "client_gone" if failure.kind == "slow_reader" else failure.kind
        self.finish(status, failure.replica_fault)

    def finish(self, status: str, replica_fault: bool = False) -> None:
        """Release everything and report; only the first call counts."""
        if self._finished:
            return
        self._finished = True
        if self._sink is not None and self._link is not None:
            self._sink.release()
            self._link.forget(self._sink)
        told = self._outcome(status, replica_fault)
        outcome = self._dispatcher.chooser.finish(self.decision.decision_id, told)
        self._dispatcher.listener.ended(self.decision, outcome)

    def _outcome(self, status: str, replica_fault: bool) -> Outcome:
        told, carried = self.usage, self._leg.carried
        first = told.get(min(told, default=0), NOTHING)
        return Outcome(
            status=status,
            replica_fault=replica_fault,
            cached_tokens=first.cached_tokens,
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum([usage.completion_tokens for usage in told.values()])
            - sum(map(carried, told) if self._leg.progress else ()),
            ttft_ms=self._ttft_ms,
            e2e_ms=1000 * (time.monotonic() - self._started_s),
        )

    def _report_first_token(self, usage: Usage) -> None:
        if self._ttft_ms is not None:
            return
        self._ttft_ms = 1000 * (self.heard_s - self._started_s)
        self._dispatcher.chooser.first_token(
            self.decision.decision_id, usage.cached_tokens, usage.prompt_tokens, self._ttft_ms
        )

    def _core_request(self) -> CoreRequest:
        job, leg, decision = self._job, self._leg, self.decision
        return CoreRequest(
            request_id=job.request_id,
            attempt=decision.attempt,
            trace_id=job.request_id,
            tenant=job.tenant,
            model=job.model,
            prompt=job.prompt,
            salt=job.salt,
            sampling=job.sampling,
            router_boot=self._dispatcher.router_boot,
            dispatch_seq=decision.dispatch_seq,
            public_cut_blocks=job.public_cut_blocks,
            priority=job.priority,
            weight=job.weight,
            ttft_deadline_ms=job.ttft_due_ms(leg),
            itl_deadline_ms=job.itl_deadline_ms,
            e2e_deadline_ms=1000 * leg.left_s,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            believed_queue_tokens=self._believed_queue_tokens(),
            warm_share=job.warm_share,
            progress=leg.progress,
            write_to=job.write_to,
            adapter=job.adapter,
        )

    def _believed_queue_tokens(self) -> int | None:
        """None where the request must stay: it was moved before, or has nowhere else to go."""
        if self._job.pin or self.decision.attempt > 1 or self.decision.fit_replicas < 2:
            return None
        return self.decision.queued_tokens


Watcher = Callable[[Job, RouteDecision], None]
"""Told of each request that was placed. Called on the event loop; must not block or raise."""


class Splits(Protocol):
    """Who may have a prompt computed by another replica than the one that answers."""

    def may(self, job: Job) -> bool:
        """Whether there is anybody to compute it for another one."""

    def begin(self, job: Job, leg: Leg, unable: frozenset[str]) -> asyncio.Task[HandOff] | HandOff:
        """The hand-off on its way, which ends by itself in time and never raises; or why there is
        none."""


class Dispatcher:
    """Asks the chooser and makes attempts. Holds no state of its own. `backends` are the replicas
    of other kinds; `lacking` tells who has not got an ability. Without `splits` every request is
    computed where it is answered."""

    def __init__(
        self,
        chooser: Chooser,
        links: Links,
        router_boot: str,
        limits: SinkLimits,
        listener: RouteListener,
        backends: Collection[str] = (),
        watchers: Sequence[Watcher] = (),
        lacking: Callable[[str], frozenset[str]] = lambda ability: frozenset(),
        splits: Splits | None = None,
    ) -> None:
        self.chooser = chooser
        self.links = links
        self.router_boot = router_boot
        self.listener = listener
        self.backends = frozenset(backends)
        self._limits = limits
        self._watchers = watchers
        self._lacking = lacking
        self._splits = splits

    def may_split(self, job: Job) -> bool:
        """Whether its prompt could be computed elsewhere."""
        return self._splits is not None and self._splits.may(job)

    def hand_off(self, job: Job, leg: Leg) -> asyncio.Task[HandOff] | HandOff:
        """Have its prompt computed elsewhere before the first attempt; as Splits.begin."""
        assert self._splits is not None
        return self._splits.begin(job, leg, self.unable(job, leg) | leg.failed)

    def unable(self, job: Job, leg: Leg) -> frozenset[str]:
        """Who can't do what this attempt asks for, however idle."""
        # A backend can't go on behind what another one has generated.
        unable = self.links.unable_to_continue() | self.backends if leg.progress else frozenset()
        return unable if job.sampling.grammar is None else unable | self._lacking(GRAMMAR)

    def decide(self, job: Job, leg: Leg) -> Attempt | ForeignAttempt:
        """Choose and reserve a replica that has not failed this request.

        Raises UserError (503) when there is none.
        """
        answer = self.chooser.decide(job.query(leg, self.unable(job, leg)))
        if isinstance(answer, NoReplica):
            raise unavailable(answer)
        self.listener.decided(answer)
        for watcher in self._watchers:
            watcher(job, answer)
        if answer.replica in self.backends:
            return ForeignAttempt(answer, self.chooser, self.listener)
        if leg.progress:
            self.listener.continued(answer, leg.carried_tokens)
        return Attempt(job, leg, answer, self, self._limits)
