"""Who loses its KV when somebody has to: one rule for blocks that ran short and for those who are
displaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from replica.cache.prefix import PrefixCache
from replica.sched.request import Request
from replica.sched.timing import Timing

MAX_PREEMPTIONS = 3
"""From here on a request is spared where others can give, and never displaced."""


class Victim(NamedTuple):
    """A request that could give way, and the blocks that this would free."""

    request: Request
    freed_blocks: int


class Victims:
    """Chooses; whoever asks preempts. All candidates are given in service order."""

    def __init__(self, cache: PrefixCache, timing: Timing) -> None:
        self._cache = cache
        self._timing = timing

    def choose(self, candidates: Sequence[Request]) -> Request | None:
        """The first of `ranked`."""
        first = min(self._useful(candidates), key=self._rank, default=None)
        return None if first is None else first.request

    def ranked(self, candidates: Sequence[Request]) -> list[Victim]:
        """Those of use: the lowest priority first, within it the least often chosen, then the most
        blocks freed per ms of computing again, then the far end."""
        return sorted(self._useful(candidates), key=self._rank)

    def recompute_ms(self, request: Request) -> float:
        """What its KV costs again, if nothing of it stays in the cache."""
        return self._timing.prefill.predict_ms(0, request.committed)

    def _useful(self, candidates: Sequence[Request]) -> list[Victim]:
        found = [Victim(each, self._cache.frees(each.blocks)) for each in reversed(candidates)]
        return [victim for victim in found if victim.freed_blocks]

    def _rank(self, victim: Victim) -> tuple[float, ...]:
        each, freed = victim
        often = min(each.preemptions, MAX_PREEMPTIONS)
        return each.spec.priority, often, -freed / max(1e-3, self.recompute_ms(each))
