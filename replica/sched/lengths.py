"""How long answers get: what a newcomer's blocks are reserved by.

The quantile of lengths seen for the tenant, among those at least as long as the answer is already.
Which quantile follows what it leads to: every retraction raises it, every answer that ends lowers
it a little, so that about TARGET_RATE retractions come on one answer.
"""

from __future__ import annotations

from bisect import bisect_right, insort
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
MAX_TENANTS = 256


class Rest(NamedTuple):
    """`tokens` more; `ends`: by then the answer is believed to be over."""

    tokens: int
    ends: bool


class _Seen:
    """The last lengths of one tenant, also in order of size."""

    __slots__ = ("_ages", "_sorted")

    def __init__(self) -> None:
        self._ages: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._ages)

    def add(self, tokens: int) -> None:
        """One more; the oldest beyond KEPT is forgotten."""
        self._ages.append(tokens)
        insort(self._sorted, tokens)
        if len(self._ages) > KEPT:
            self._sorted.remove(self._ages.popleft())

    def beyond(self, tokens: int, quantile: float) -> int | None:
        """The quantile of those longer than `tokens`; None when there were none."""
        first = bisect_right(self._sorted, tokens)
        longer = len(self._sorted) - first
        return self._sorted[first + int(quantile * (longer - 1))] if longer else None


class OutputLengths:
    """One engine has one model: lengths are kept by tenant, and for all of them together."""

    def __init__(self, cold_tokens: int) -> None:
        """`cold_tokens`: how far to look ahead while too few answers were seen."""
        self.quantile = START_QUANTILE
        self._cold_tokens = cold_tokens
        self._all = _Seen()
        self._tenants: dict[str, _Seen] = {}

    def ended(self, request: Request) -> None:
        """An answer came to its own end."""
        self.quantile = max(LEAST_QUANTILE, self.quantile - STEP * TARGET_RATE)
        if request.spec.params.ignore_eos:
            return
        seen = self._tenants.pop(request.spec.tenant, None) or _Seen()
        self._tenants[request.spec.tenant] = seen
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        seen.add(request.generated)
        self._all.add(request.generated)

    def retracted(self) -> None:
        """Blocks ran short: answers were longer than believed."""
        self.quantile = min(MOST_QUANTILE, self.quantile + STEP)

    def rest(self, request: Request) -> Rest:
        """What the request will still put out."""
        remaining = request.remaining
        if request.spec.params.ignore_eos:
            return Rest(remaining, True)
        seen = self._tenants.get(request.spec.tenant)
        if seen is None or len(seen) < ENOUGH:
            seen = self._all
        length = seen.beyond(request.generated, self.quantile) if len(seen) >= ENOUGH else None
        if length is None:
            return Rest(min(remaining, self._cold_tokens), remaining <= self._cold_tokens)
        return Rest(min(remaining, length - request.generated), True)
