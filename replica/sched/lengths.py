"""How long answers get: what a newcomer's blocks are reserved by.

The quantile of lengths seen for the tenant with the model or adapter, among those at least as long
as the answer is already. What was cut off by its `max_tokens` says nothing of answers that may get
longer: neither do one-token requests of any kind, nor prompts that are computed for others. Which
quantile follows what it leads to: every retraction raises it, every answer that ends lowers
it a little, so that about TARGET_RATE retractions come on one answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import NamedTuple

from replica.sched.request import Request

TARGET_RATE = 0.02
START_QUANTILE = 0.8
LEAST_QUANTILE = 0.5
MOST_QUANTILE = 0.99
STEP = 0.05
KEPT = 128
ENOUGH = 8
MAX_SOURCES = 256


class Rest(NamedTuple):
    """`tokens` more; `ends`: by then the answer is believed to be over."""

    tokens: int
    ends: bool


Source = tuple[str, str]
"""Tenant, and the adapter that its answers are computed with: empty for the model itself."""


class _Seen:
    """The last lengths from one source, in order of size: of answers that ended by themselves, and
    of those that were cut off."""

    __slots__ = ("_ages", "_cut", "_whole")

    def __init__(self) -> None:
        self._ages: deque[tuple[list[int], int]] = deque()
        self._whole: list[int] = []
        self._cut: list[int] = []

    def add(self, tokens: int, cut: bool) -> None:
        """One more; the oldest beyond KEPT is forgotten."""
        lengths = self._cut if cut else self._whole
        insort(lengths, tokens)
        self._ages.append((lengths, tokens))
        if len(self._ages) > KEPT:
            lengths, oldest = self._ages.popleft()
            lengths.remove(oldest)

    def telling(self, most: int) -> int:
        """How many say something of an answer of at most `most` tokens."""
        return len(self._whole) + len(self._cut) - bisect_left(self._cut, most)

    def beyond(self, tokens: int, most: int, quantile: float) -> int | None:
        """The quantile of those longer than `tokens`, as of an answer of at most `most`; None when
        there were none."""
        first = bisect_right(self._whole, tokens)
        longer = self.telling(most) - first
        if not longer:
            return None
        place = first + int(quantile * (longer - 1))
        # Those that were cut off got as long as this one may.
        return min(most, self._whole[place]) if place < len(self._whole) else most


class OutputLengths:
    """Lengths by source, and of all of them together."""

    def __init__(self, cold_tokens: int) -> None:
        """`cold_tokens`: how far to look ahead while too few answers were seen."""
        self.quantile = START_QUANTILE
        self._cold_tokens = cold_tokens
        self._all = _Seen()
        self._sources: dict[Source, _Seen] = {}

    def ended(self, request: Request) -> None:
        """An answer came to its end, or to its `max_tokens`."""
        if request.spec.write_to:
            return
        self.quantile = max(LEAST_QUANTILE, self.quantile - STEP * TARGET_RATE)
        if request.spec.params.ignore_eos:
            return
        source = _source(request)
        seen = self._sources.pop(source, None) or _Seen()
        self._sources[source] = seen
        if len(self._sources) > MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        for each in (seen, self._all):
            each.add(request.generated, cut=request.remaining <= 0)

    def retracted(self) -> None:
        """Blocks ran short: answers were longer than believed."""
        self.quantile = min(MOST_QUANTILE, self.quantile + STEP)

    def rest(self, request: Request) -> Rest:
        """What the request will still put out."""
        remaining = request.remaining
        if request.spec.params.ignore_eos:
            return Rest(remaining, True)
        generated, most = request.generated, request.spec.params.max_tokens
        for seen in (self._sources.get(_source(request)), self._all):
            if seen is not None and seen.telling(most) >= ENOUGH:
                length = seen.beyond(generated, most, self.quantile)
                break
        else:
            length = None
        if length is None:
            return Rest(min(remaining, self._cold_tokens), remaining <= self._cold_tokens)
        return Rest(length - generated, True)


def _source(request: Request) -> Source:
    return request.spec.tenant, request.adapter
