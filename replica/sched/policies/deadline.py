"""By deadline: who has to start soonest, shared among tenants, with nobody left behind.

Priority, then slack class, then the tenant's virtual time, then the longest cached prefix.

- Slack is the time left until the request has to start for its first token to be in time; the
  estimate of its prefill is stretched by its own error. Without a deadline, or before anything was
  learnt, a request has to start within a patience that grows with its size: so small ones go first,
  and whoever waits becomes urgent (ageing). Whichever comes first counts.
- Within a class tenants share the device by virtual time (start-time fair queueing: Goyal, Vin and
  Cheng 1996; for serving: Sheng et al. 2024). It grows with what a tenant's requests cost, divided
  by the tenant's weight, so a flood is urgent only in its turn. What is urgent stays so: nobody
  starves. Who leaves without having been started costs its tenant nothing.
- What can't have its first token in time even by an estimate that is cut by its error is refused:
  at intake, when others wait before it, or as soon as that is so.

Decodes come before prefill in every step, so no order here takes their share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from replica.sched.order import Rank, Task, Turn
from replica.sched.plan import ChildId

SLACK_S = (0.25, 1.0, 4.0)
"""Upper bounds of the slack classes; what has more is in the last one."""

PATIENCE = ((256, 1.0), (2_048, 3.0), (16_384, 10.0), (inf, 30.0))
"""(uncached tokens up to which, seconds until it has to start)."""

QUANTUM_MS = 20.0
"""Virtual times that are closer than this are equal, for the prefix to decide."""

MAX_TURNS = 16
"""How many requests change their class in one step; the others do so in the next ones."""

MAX_TENANTS = 1_024

_at_s = itemgetter(0)


class _Waiting(NamedTuple):
    """What the time will change for a request: `at_s` is when it changes next."""

    at_s: float
    rank: Rank
    start_by_s: float
    last_chance_s: float


class Deadline:
    """Holds the coming event of each request that has one, and a tag for each tenant.

    Events lie in the order of their time, and leave with their request: so a step takes what is due
    from the front, and nothing ever has to be swept.
    """

    by_priority = by_deadline = True

    def __init__(self) -> None:
        self._events: list[tuple[float, ChildId]] = []
        self._waiting: dict[ChildId, _Waiting] = {}
        self._virtual_ms = 0.0
        self._ends_ms: dict[str, float] = {}
        self._charges: dict[ChildId, tuple[str, float]] = {}

    @property
    def events(self) -> int:
        """How many changes are to come."""
        return len(self._events)

    @property
    def tenants(self) -> int:
        """Whose virtual time is remembered."""
        return len(self._ends_ms)

    def enter(self, task: Task) -> Rank:
        """See Policy."""
        due_s = start_by_s(task)
        tag = self._tag_ms(task) // QUANTUM_MS
        tail = (tag, -task.hit_tokens, task.arrival_s, task.child)
        rank = (-task.priority, slack_class(due_s - task.arrival_s), *tail)
        self._await(task.child, rank, due_s, last_chance_s(task), task.arrival_s)
        return rank

    def refuses(self, task: Task, ahead_ms: float) -> bool:
        """See Policy."""
        if task.first_by_s is None or task.error is None or ahead_ms <= 0.0:
            return False
        least_ms = (ahead_ms + task.prefill_ms) / (1.0 + task.error)
        if task.arrival_s + 1e-3 * least_ms <= task.first_by_s:
            return False
        self.left(task.child)
        return True

    def started(self, rank: Rank) -> None:
        """See Policy."""
        self._virtual_ms = max(self._virtual_ms, rank[2] * QUANTUM_MS)
        self._charges.pop(ChildId(int(rank[-1])), None)

    def left(self, child: ChildId) -> None:
        """See Policy."""
        waiting = self._waiting.pop(child, None)
        if waiting is not None:
            del self._events[bisect_left(self._events, (waiting.at_s, child))]
        tenant, charged_ms = self._charges.pop(child, ("", 0.0))
        if tenant in self._ends_ms:
            self._ends_ms[tenant] -= charged_ms

    def advance(self, now_s: float) -> Sequence[Turn]:
        """See Policy."""
        due = bisect_right(self._events, now_s, hi=min(MAX_TURNS, len(self._events)), key=_at_s)
        children = [child for _, child in self._events[:due]]
        del self._events[:due]
        return [self._turn(child, self._waiting.pop(child), now_s) for child in children]

    def _turn(self, child: ChildId, waiting: _Waiting, now_s: float) -> Turn:
        rank, due_s = waiting.rank, waiting.start_by_s
        if rank[1] == 0:
            return Turn(child, None)
        urgent = (rank[0], slack_class(due_s - now_s), *rank[2:])
        self._await(child, urgent, due_s, waiting.last_chance_s, now_s)
        return Turn(child, urgent)

    def _await(
        self, child: ChildId, rank: Rank, due_s: float, last_chance_s: float, now_s: float
    ) -> None:
        """The next time at which something changes for it: one class up, or too late."""
        above = int(rank[1]) - 1
        at_s = max(now_s, last_chance_s if above < 0 else due_s - SLACK_S[above])
        if at_s < inf:
            self._waiting[child] = _Waiting(at_s, rank, due_s, last_chance_s)
            insort(self._events, (at_s, child))

    def _tag_ms(self, task: Task) -> float:
        """The tenant's virtual time at which the request starts; it ends by its cost later."""
        start_ms = max(self._virtual_ms, self._ends_ms.pop(task.tenant, 0.0))
        self._ends_ms[task.tenant] = start_ms + charge_ms(task)
        self._charges[task.child] = task.tenant, charge_ms(task)
        if len(self._ends_ms) > MAX_TENANTS:
            del self._ends_ms[next(iter(self._ends_ms))]
        return start_ms


def charge_ms(task: Task) -> float:
    """What it adds to its tenant's virtual time."""
    return (task.prefill_ms + task.decode_ms) / task.weight


def slack_class(slack_s: float) -> int:
    """0 for what is urgent."""
    return bisect_left(SLACK_S, slack_s)


def start_by_s(task: Task) -> float:
    """When it has to start, by its deadline or its patience."""
    patience_s = next(seconds for tokens, seconds in PATIENCE if task.uncached_tokens <= tokens)
    aged_s = task.arrival_s + patience_s
    if task.first_by_s is None or task.error is None:
        return aged_s
    return min(aged_s, task.first_by_s - 1e-3 * task.prefill_ms * (1.0 + task.error))


def last_chance_s(task: Task) -> float:
    """After this its first token is too late even if it takes as little as it may."""
    if task.first_by_s is None or task.error is None:
        return inf
    return task.first_by_s - 1e-3 * task.prefill_ms / (1.0 + task.error)
