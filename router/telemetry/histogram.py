"""A Prometheus histogram for what happens all the time: counts in a list, added up when read.

The library's own takes locks and several calls for each observation: as much as writing the delta.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Event loop only. `bounds`: ascending upper bounds of the buckets, infinity left out."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """All that another one of the same bounds has counted."""
        self.take(other._counts, other.total)

    def take(self, counts: Sequence[int], total: float) -> None:
        """What somebody else has counted: so many values in each bucket, and their sum."""
        self._counts = [own + more for own, more in zip(self._counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, values up to it) of each bucket."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What the library's own would give."""
        yield HistogramMetricFamily(self._name, self._help, self.buckets(), self.total)
