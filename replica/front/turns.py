"""Whose turn it is where few threads serve many tenants: each in turn, never all threads to one.

Plain data on the event loop, no clock. Within a tenant: first come, first served.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Turns(Generic[Job]):
    """Bounded in all by `most`, and by half of that for any one tenant."""

    def __init__(self, threads: int, most: int) -> None:
        self._free = threads
        self._at_once = max(1, threads - 1)
        self._most = most
        self._most_of_one = max(1, most // 2)
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()
        self._working: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        """Jobs that wait or are at work."""
        return self._count

    def add(self, tenant: str, job: Job) -> bool:
        """Behind the tenant's others; False when there are too many."""
        own = len(self._lines.get(tenant, ())) + self._working[tenant]
        if self._count >= self._most or own >= self._most_of_one:
            self._forget(tenant)
            return False
        self._lines.setdefault(tenant, deque()).append(job)
        self._count += 1
        return True

    def next(self) -> tuple[str, Job] | None:
        """The next job and whose it is; at work until `done`. None while nobody's may start."""
        if not self._free:
            return None
        for tenant, line in self._lines.items():
            if self._working[tenant] < self._at_once:
                job = line.popleft()
                self._free -= 1
                self._working[tenant] += 1
                self._lines.move_to_end(tenant)
                if not line:
                    del self._lines[tenant]
                return tenant, job
        return None

    def done(self, tenant: str) -> None:
        """One of its jobs is not at work any more."""
        self._free += 1
        self._count -= 1
        self._working[tenant] -= 1
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._working[tenant]:
            del self._working[tenant]
