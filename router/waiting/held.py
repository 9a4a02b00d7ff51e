"""What one stage holds: how much in all, of how much at most, since when, and what it refused."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable


class Held:
    """Parts by their owner, the oldest first. `refused` counts by reason."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.depth = 0.0
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._parts: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def fits(self, amount: float) -> bool:
        """Whether so much more stays within the limit."""
        return self.depth + amount <= self.limit

    def add(self, owner: Hashable, amount: float) -> None:
        """Its owner holds that much from now on."""
        self._parts[owner] = (self._clock(), amount)
        self.depth += amount

    def remove(self, owner: Hashable) -> None:
        """Its owner holds nothing any more. Idempotent."""
        part = self._parts.pop(owner, None)
        if part is not None:
            self.depth -= part[1]

    def oldest_s(self) -> float:
        """For how long the oldest part has been held; 0 without any."""
        oldest = next(iter(self._parts.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest[0]
