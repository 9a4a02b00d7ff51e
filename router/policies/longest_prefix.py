"""Longest prefix with an imbalance gate, as SGLang's gateway does it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Stateless, least_loaded
from router.route import RouteQuery

BALANCE_ABSOLUTE = 64
BALANCE_RELATIVE = 1.5
MATCH_THRESHOLD = 0.3


class LongestPrefix(Stateless):
    """By load when the fleet is out of balance or the match is short, else by match alone."""

    name = "longest_prefix"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """Gate, then match, then load."""
        loads = [candidate.requests for candidate in candidates]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            return Pick(least_loaded(candidates, rng), "out of balance")
        longest = max(candidate.overlap_blocks for candidate in candidates)
        if longest <= MATCH_THRESHOLD * max(1, len(query.chain)):
            return Pick(least_loaded(candidates, rng), "match too short")
        holders = [c for c in candidates if c.overlap_blocks == longest]
        return Pick(least_loaded(holders, rng), "longest prefix")
