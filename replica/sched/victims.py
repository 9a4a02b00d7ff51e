"""Who loses its KV when somebody has to: one rule for blocks that ran short and for those who are
displaced."""

from __future__ import annotations

from collections.abc import Sequence

from replica.cache.prefix import PrefixCache
from replica.sched.request import Request
from replica.sched.timing import Timing

MAX_PREEMPTIONS = 3
"""From here on a request is spared where others can give, and never displaced."""


class Victims:
    """Chooses; whoever asks preempts. All candidates are given in service order."""

    def __init__(self, cache: PrefixCache, timing: Timing) -> None:
        self._cache = cache
        self._timing = timing

    def choose(self, candidates: Sequence[Request]) -> Request | None:
        """From the lowest priority that has somebody of use: the least often chosen, then the most
        blocks freed per ms of computing again, then the far end."""
        useful = [(self._cache.frees(each.blocks), each) for each in reversed(candidates)]
        useful = [(freed, each) for freed, each in useful if freed]
        if not useful:
            return None
        lowest = min(each.spec.priority for _, each in useful)

        def worth(entry: tuple[int, Request]) -> tuple[float, float]:
            freed, each = entry
            often = min(each.preemptions, MAX_PREEMPTIONS)
            return -often, freed / max(1e-3, self.recompute_ms(each))

        return max((entry for entry in useful if entry[1].spec.priority == lowest), key=worth)[1]

    def recompute_ms(self, request: Request) -> float:
        """What its KV costs again, if nothing of it stays in the cache."""
        return self._timing.prefill.predict_ms(0, request.committed)
