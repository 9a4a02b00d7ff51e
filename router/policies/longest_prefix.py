"""Longest prefix with an imbalance gate, as SGLang's and vLLM's routers do it.

Source: sgl-project/sglang `sgl-model-gateway` (wheel sglang_router 0.3.2) and vllm-project/router,
policy `cache_aware`, with their defaults. Misses go by load, as since sglang PR 14532 (before: to
the smallest tree, which drowned one worker). Both guess what is cached from their own decisions;
here the rule gets the same index of real events as ours, which can only help it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless, least_loaded

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
            return Pick(least_loaded(candidates, rng).replica, "out of balance")
        longest = max(candidate.overlap_blocks for candidate in candidates)
        if longest * query.block_tokens <= MATCH_THRESHOLD * query.prompt_tokens:
            return Pick(least_loaded(candidates, rng).replica, "match too short")
        holders = [c for c in candidates if c.overlap_blocks == longest]
        return Pick(least_loaded(holders, rng).replica, "longest prefix")
