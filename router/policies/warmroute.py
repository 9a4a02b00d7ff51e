"""The default policy: the least predicted cost in milliseconds, and a guard for hot prefixes."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from router.policies.base import Candidate, Candidates, Pick
from router.policies.heat import WINDOW_REQUESTS, PrefixHeat
from router.route import RouteQuery

TIE_MS = 1.0
TIE_SHARE = 0.02
"""Scores closer than this share of the prompt's prefill are no difference that can be known."""


class Warmroute:
    """Highest score wins. Ties go to whoever got fewer of the last requests, then at random."""

    name = "warmroute"

    def __init__(self) -> None:
        self._heat = PrefixHeat()
        self._recent: deque[str] = deque(maxlen=WINDOW_REQUESTS)
        self._placed: Counter[str] = Counter()

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick:
        """The best score, unless its hot prefix deserves one more holder that waits no longer."""
        shared = int(candidates.overlaps.max())
        best = candidates[self._best(candidates, np.arange(len(candidates)), rng)]
        spread = self._new_holder(query, candidates, best, shared, rng)
        if spread is not None:
            return Pick(spread, "one more holder for a hot prefix")
        if not best.overlap_blocks:
            return Pick(best, "cold: least cost")
        return Pick(best, "warm" if best.overlap_blocks == shared else "less warm, but sooner")

    def placed(self, query: RouteQuery, candidates: Candidates, pick: Pick) -> None:
        """Remember the prefix and the place."""
        self._heat.note(query.chain, int(candidates.overlaps.max()))
        if len(self._recent) == self._recent.maxlen:
            self._placed[self._recent[0]] -= 1
        self._recent.append(pick.candidate.replica)
        self._placed[pick.candidate.replica] += 1

    def _best(self, candidates: Candidates, among: np.ndarray, rng: random.Random) -> int:
        """The place of the best of those."""
        scores = candidates.scores[among]
        first = int(scores.argmax())
        top = candidates[int(among[first])].terms
        margin = max(TIE_MS, TIE_SHARE * (top.saved_prefill_ms + top.prefill_ms))
        tied = among[scores[first] - scores <= margin].tolist()
        placed = [self._placed.get(candidates.replicas[place], 0) for place in tied]
        fewest = min(placed)
        return rng.choice(
            [place for place, count in zip(tied, placed, strict=True) if count == fewest]
        )

    def _new_holder(
        self,
        query: RouteQuery,
        candidates: Candidates,
        best: Candidate,
        shared: int,
        rng: random.Random,
    ) -> Candidate | None:
        deserved = self._heat.holders_deserved(query.chain, shared, len(candidates))
        others = np.flatnonzero(candidates.overlaps < shared)
        if best.overlap_blocks < shared or len(candidates) - len(others) >= deserved:
            return None
        other = candidates[self._best(candidates, others, rng)]
        return other if _waiting_ms(other) <= _waiting_ms(best) + TIE_MS else None


def _waiting_ms(candidate: Candidate) -> float:
    terms = candidate.terms
    return terms.queue_ms + terms.overload_ms + terms.lateness_ms
