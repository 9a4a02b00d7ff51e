"""How often something happens lately, without keeping when it did."""

from __future__ import annotations

import math
from collections.abc import Callable


class Rate:
    """A count that halves every `half_life_s`, and what it comes to per second."""

    def __init__(self, clock: Callable[[], float], half_life_s: float) -> None:
        self._clock = clock
        self._half_life_s = half_life_s
        self._count = 0.0
        self._at_s = clock()

    def add(self, count: float = 1.0) -> None:
        """That many more, now."""
        self._decay()
        self._count += count

    def per_s(self) -> float:
        """As many per second, lately."""
        self._decay()
        return self._count * math.log(2) / self._half_life_s

    def _decay(self) -> None:
        now_s = self._clock()
        self._count *= 0.5 ** ((now_s - self._at_s) / self._half_life_s)
        self._at_s = now_s
