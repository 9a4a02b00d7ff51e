"""A second order beside the one in force: it hears the same, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from replica.engine.messages import ShadowCounts
from replica.sched.order import Policy, Rank, Task
from replica.sched.plan import ChildId
from replica.sched.request import Request


class Shadow:
    """Holds a rank for each waiting request."""

    def __init__(self, policy: Policy) -> None:
        self._started = self._differed = self._overtaken = self._refused = 0
        self._policy = policy
        self._ranks: dict[ChildId, Rank] = {}

    def enter(self, task: Task) -> None:
        """A request comes."""
        self._ranks[task.child] = self._policy.enter(task)

    def started(self, child: ChildId, waiting: Sequence[Request]) -> None:
        """A request is started while those others wait."""
        rank = self._ranks.pop(child, None)
        if rank is None:
            return
        self._policy.started(rank)
        before = sum(self._ranks.get(other.child, rank) < rank for other in waiting)
        self._started += 1
        self._differed += before > 0
        self._overtaken += before

    def left(self, child: ChildId) -> None:
        """A request has ended."""
        self._ranks.pop(child, None)
        self._policy.left(child)

    def advance(self, now_s: float) -> None:
        """One step later."""
        for turn in self._policy.advance(now_s):
            if turn.child not in self._ranks:
                continue
            if turn.rank is None:
                self._refused += 1
            else:
                self._ranks[turn.child] = turn.rank

    def counts(self) -> ShadowCounts:
        """Since the start."""
        return ShadowCounts(self._started, self._differed, self._overtaken, self._refused)
