"""The order of service in force: it ranks requests when they come, and again as time goes by.

A second order may run in its shadow. It is told of the same requests, and only counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from events.errors import CoreError
from replica.engine.messages import ShadowCounts
from replica.sched.lifecycle import Lifecycle
from replica.sched.order import Policy, Task
from replica.sched.refusals import comes_too_late
from replica.sched.request import Request, State
from replica.sched.shadow import Shadow
from replica.sched.timing import Timing

DECODE_TOKENS = 256
"""An answer counts for so many tokens at most: few are as long as they may be."""

SEEN_BY_SHADOW = 64
"""How many of those that wait the shadow compares with a request that is started."""


class Service:
    """Changes ranks, and refuses what the order in force calls hopeless; starts nothing."""

    def __init__(
        self, policy: Policy, shadow: Policy | None, lifecycle: Lifecycle, timing: Timing
    ) -> None:
        self._shadow = None if shadow is None else Shadow(shadow)
        self._policy = policy
        self._lifecycle = lifecycle
        self._table = lifecycle.table
        self._timing = timing

    def enter(self, request: Request, hit_tokens: int) -> CoreError | None:
        """Rank a request that is not in the table yet. The error, if it comes too late."""
        task = self._task(request, hit_tokens)
        if self._shadow is not None:
            self._shadow.enter(task)
        request.rank = self._policy.enter(task)
        ahead_ms = self._waiting_ms() * self._table.share_before(request.rank)
        return comes_too_late(ahead_ms) if self._policy.refuses(task, ahead_ms) else None

    def advance(self, now_s: float) -> None:
        """Once per step, before it is planned."""
        for child in self._lifecycle.take_ended():
            self._policy.left(child)
            if self._shadow is not None:
                self._shadow.left(child)
        if self._shadow is not None:
            self._shadow.advance(now_s)
        for turn in self._policy.advance(now_s):
            request = self._table.get(turn.child)
            if request is None or request.over:
                continue
            if turn.rank is not None:
                self._table.rerank(request, turn.rank)
            elif self._gives_way(request):
                self._lifecycle.refuse(request, comes_too_late(self._waiting_ms()))

    def started(self, requests: Sequence[Request]) -> None:
        """What the plan just made has started, in that order."""
        waiting = self._table.waiting[:SEEN_BY_SHADOW] if self._shadow is not None else []
        for request in requests:
            self._policy.started(request.rank)
            if self._shadow is not None:
                self._shadow.started(request.child, waiting)

    def _gives_way(self, request: Request) -> bool:
        """Whether refusing it helps anybody: alone it is served, late or not."""
        fresh = request.state is State.QUEUED and not request.scheduled_s
        return fresh and len(self._table) > 1

    def shadow_counts(self) -> ShadowCounts | None:
        """What the order in the shadow would have done; None without one."""
        return None if self._shadow is None else self._shadow.counts()

    def _waiting_ms(self) -> float:
        """Prefill that waits, attention apart: it takes at least this."""
        table = self._table
        return self._timing.prefill.b * (table.waiting_tokens - table.waiting_hit_tokens)

    def _task(self, request: Request, hit_tokens: int) -> Task:
        spec, model = request.spec, self._timing.model()
        prefill = model.prefill
        uncached = len(request.tokens) - hit_tokens
        return Task(
            child=request.child,
            tenant=spec.tenant,
            priority=spec.priority,
            weight=spec.weight,
            arrival_s=spec.arrival_s,
            # What goes on from elsewhere has had its first token.
            first_by_s=None if spec.output else spec.first_by_s,
            hit_tokens=hit_tokens,
            uncached_tokens=uncached,
            prefill_ms=prefill.predict_ms(hit_tokens, uncached),
            decode_ms=model.decode.per_row * min(request.remaining, DECODE_TOKENS),
            error=self._timing.sure_error,
        )
