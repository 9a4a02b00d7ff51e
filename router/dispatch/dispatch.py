"""One attempt of one request: decided and reserved, sent, its deltas taken, its end reported once.

Between the choice, its reservation and the frame in the link's outbox there is no await. `finish`
is the only release; every exit path leads there, and only its first call counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from msgspec.structs import replace

from events.decision import RouteDecision
from events.errors import CoreError, UserError
from events.grammar import GRAMMAR
from events.output import CLEAN_FINISHES, CoreDelta, Usage
from events.request import CoreRequest
from router.backends.attempt import ForeignAttempt
from router.choice.pools import cheapest
from router.choice.route import Chooser, HandOff, NoReplica, Outcome, RouteQuery
from router.dispatch.job import Job, Leg
from router.dispatch.links import Links
from router.dispatch.sink import AttemptSink, Direct, SinkLimits
from router.errors import AttemptError, finish_failure, transport_failure

NOTHING = Usage(0, 0, 0)


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
        chutes = self._link.attempts.chutes if self._job.sampling.n == 1 else None
        sink = AttemptSink(key, children, self._limits, self._link.control, chutes)
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
            self._link.attempts.forget(self._sink)
        told = self._outcome(status, replica_fault)
        outcome = self._dispatcher.chooser.finish(self.decision.decision_id, told)
        self._dispatcher.listener.ended(self.decision, outcome)

    def _outcome(self, status: str, replica_fault: bool) -> Outcome:
        told, leg = self.usage, self._leg
        first = told.get(0) or told.get(min(told, default=0), NOTHING)
        completion_tokens = first.completion_tokens
        if len(told) > 1:
            completion_tokens = sum([usage.completion_tokens for usage in told.values()])
        if leg.progress:
            completion_tokens -= sum(map(leg.carried, told))
        return Outcome(
            status=status,
            replica_fault=replica_fault,
            cached_tokens=first.cached_tokens,
            prompt_tokens=first.prompt_tokens,
            completion_tokens=completion_tokens,
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

    def placing(self, job: Job, leg: Leg) -> tuple[Job, RouteQuery]:
        """The job as the pool takes it that it goes to now, and what its chooser is asked. What was
        computed for it before is of use to its own pool alone."""
        unable = self.unable(job, leg)
        query = job.query(leg, unable)
        if not job.others:
            return job, query
        bare = replace(leg, hand_off=None)
        jobs = (job, *job.others)
        queries = [query, *(other.query(bare, unable) for other in job.others)]
        at, query = cheapest(self.chooser.survey, queries)
        return jobs[at], query

    def decide(self, job: Job, leg: Leg) -> Attempt | ForeignAttempt:
        """Choose and reserve a replica that has not failed this request.

        Raises UserError (503) when there is none.
        """
        job, query = self.placing(job, leg)
        answer = self.chooser.decide(query)
        if isinstance(answer, NoReplica):
            raise unavailable(answer)
        self.listener.decided(answer)
        for watcher in self._watchers:
            watcher(job, answer)
        if answer.replica in self.backends:
            most_tokens = job.sampling.n * job.sampling.max_tokens
            return ForeignAttempt(answer, self.chooser, self.listener, most_tokens)
        if leg.progress:
            self.listener.continued(answer, leg.carried_tokens)
        return Attempt(job, leg, answer, self, self._limits)
