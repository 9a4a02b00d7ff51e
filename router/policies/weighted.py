"""Weighted sum of scores in [0, 1], as llm-d's scheduler combines its scorers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Stateless
from router.route import RouteQuery

PREFIX_WEIGHT = 3.0
QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0


class Weighted(Stateless):
    """3 x prefix share + 2 x shortness of the queue + 2 x free KV; highest wins."""

    name = "weighted"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The best score; ties at random."""
        loads = [candidate.requests for candidate in candidates]
        least, spread = min(loads), max(1, max(loads) - min(loads))
        scores = [_score(query, candidate, least, spread) for candidate in candidates]
        highest = max(scores)
        best = [c for c, score in zip(candidates, scores, strict=True) if score == highest]
        return Pick(rng.choice(best), f"weighted {highest:.2f}")


def _score(query: RouteQuery, candidate: Candidate, least: int, spread: int) -> float:
    prefix = candidate.overlap_blocks / max(1, len(query.chain))
    queue = 1.0 - (candidate.requests - least) / spread
    free = 1.0 - min(1.0, candidate.used_blocks / max(1, candidate.total_blocks))
    return PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * free
