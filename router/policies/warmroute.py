"""The default policy: the least predicted cost in milliseconds, and a guard for hot prefixes."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import repeat

import numpy as np

from router.cost import TERMS
from router.policies.base import Candidates, Pick
from router.policies.heat import WINDOW_REQUESTS, PrefixHeat
from router.route import RouteQuery

TIE_MS = 1.0
TIE_SHARE = 0.02
"""Scores closer than this share of the prompt's prefill are no difference that can be known."""


_SAVED, _PREFILL = map(TERMS.index, ("saved_prefill_ms", "prefill_ms"))
_WAITING = [TERMS.index(name) for name in ("queue_ms", "overload_ms", "lateness_ms")]


class Warmroute:
    """Highest score wins. Ties go to whoever got fewer of the last requests, then at random."""

    name = "warmroute"

    def __init__(self) -> None:
        self._heat = PrefixHeat()
        self._recent: deque[str] = deque(maxlen=WINDOW_REQUESTS)
        self._placed: Counter[str] = Counter()

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick:
        """The best score, unless its hot prefix deserves one more holder that waits no longer."""
        best = self._best(candidates, None, rng)
        other = self._new_holder(query, candidates, best, rng)
        if other is not None:
            return Pick(candidates[other], "one more holder for a hot prefix")
        overlap = int(candidates.overlaps[best])
        if not overlap:
            return Pick(candidates[best], "cold: least cost")
        longest = overlap == candidates.longest()
        return Pick(candidates[best], "warm" if longest else "less warm, but sooner")

    def placed(self, query: RouteQuery, candidates: Candidates, pick: Pick) -> None:
        """Remember the prefix and the place."""
        self._heat.note(query.chain, candidates.longest())
        if len(self._recent) == self._recent.maxlen:
            self._placed[self._recent[0]] -= 1
        self._recent.append(pick.candidate.replica)
        self._placed[pick.candidate.replica] += 1

    def _best(self, candidates: Candidates, among: np.ndarray | None, rng: random.Random) -> int:
        """The place of the best, or of the best of those."""
        scores = candidates.scores if among is None else candidates.scores[among]
        first = int(scores.argmax())
        top = candidates.terms[first if among is None else among[first]]
        margin = max(TIE_MS, TIE_SHARE * float(top[_SAVED] + top[_PREFILL]))
        (tied,) = (scores >= scores[first] - margin).nonzero()
        places = (tied if among is None else among[tied]).tolist()
        if len(places) == 1:
            return rng.choice(places)
        replicas = map(candidates.replicas.__getitem__, places)
        placed = list(map(self._placed.get, replicas, repeat(0)))
        fewest = min(placed)
        return rng.choice(
            [place for place, count in zip(places, placed, strict=True) if count == fewest]
        )

    def _new_holder(
        self, query: RouteQuery, candidates: Candidates, best: int, rng: random.Random
    ) -> int | None:
        """The place of one more holder of the prefix that the best one shares."""
        shared = candidates.longest()
        deserved = self._heat.holders_deserved(query.chain, shared, len(candidates))
        if not deserved or candidates.overlaps[best] < shared:
            return None
        others = np.flatnonzero(candidates.overlaps < shared)
        if len(candidates) - len(others) >= deserved:
            return None
        other = self._best(candidates, others, rng)
        waits_longer = _waiting_ms(candidates, other) > _waiting_ms(candidates, best) + TIE_MS
        return None if waits_longer else other


def _waiting_ms(candidates: Candidates, place: int) -> float:
    return float(candidates.terms[place, _WAITING].sum())
