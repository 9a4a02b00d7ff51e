"""Names that may become labels: the tenants with most of the traffic; all others are one.

A metric's labels must stay few and must not come and go with every request. So the few names are
chosen anew only now and then, by the traffic since the last time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

NAMED = 16
COUNTED = 4_096
"""Names that are counted between two choices; beyond them a new one waits for the next."""

RENEW_AFTER = 20_000
"""Requests."""

OTHERS = "other"

OnDropped = Callable[[str], None]
"""Called with a name that has become one of the others."""


class TopNames:
    """The `limit` busiest names."""

    def __init__(self, on_dropped: OnDropped, limit: int = NAMED, every: int = RENEW_AFTER) -> None:
        self._on_dropped = on_dropped
        self._limit = limit
        self._every = every
        self._seen = 0
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()

    def label(self, name: str) -> str:
        """One more request of it; the name itself, or `OTHERS`."""
        self._seen += 1
        if self._seen >= self._every:
            self._renew()
        if name in self._counts or len(self._counts) < COUNTED:
            self._counts[name] += 1
        if name not in self._named and len(self._named) < self._limit:
            self._named.add(name)
        return name if name in self._named else OTHERS

    def _renew(self) -> None:
        busiest = {name for name, _ in self._counts.most_common(self._limit)}
        for name in self._named - busiest:
            self._on_dropped(name)
        self._named = busiest
        self._counts.clear()
        self._seen = 0
