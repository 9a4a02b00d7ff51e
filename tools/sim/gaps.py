"""Gaps between tokens, counted in buckets that grow by a few per cent."""

from __future__ import annotations

import math
from collections import Counter

GROWTH = 1.02


class Gaps:
    """A weighted histogram of times in ms; quantiles are right within one bucket."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, gap_ms: float, tokens: int) -> None:
        """So many tokens came that long after the one before."""
        if tokens:
            self._buckets[math.ceil(math.log(max(gap_ms, 1e-3), GROWTH))] += tokens

    def update(self, other: Gaps) -> None:
        """Take in another histogram."""
        self._buckets.update(other._buckets)

    def quantile_ms(self, share: float) -> float:
        """The gap below which that share of the tokens came; 0 without any."""
        left = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return GROWTH**bucket
        return 0.0
