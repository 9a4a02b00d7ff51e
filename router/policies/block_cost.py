"""Blocks to prefill plus blocks in use, as Dynamo's KV router scores.

Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs`, with the defaults of
1.x: overlap credit 1, its decay off, prefill load scale 1, weight of active requests 0,
temperature 0 (the least cost wins).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless

OVERLAP_CREDIT = 1.0
PREFILL_SCALE = 1.0


class BlockCost(Stateless):
    """cost = prefill blocks queued and new, less the overlap, plus active blocks; lowest wins."""

    name = "block_cost"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The cheapest; ties at random."""
        costs = [_cost(query, candidate) for candidate in candidates]
        lowest = min(costs)
        cheapest = [c for c, cost in zip(candidates, costs, strict=True) if cost == lowest]
        return Pick(rng.choice(cheapest).replica, f"{lowest:.0f} blocks")


def _cost(query: RouteQuery, candidate: Candidate) -> float:
    """What the request itself adds to the active blocks is the same everywhere."""
    queued = candidate.queued_prefill_tokens / query.block_tokens
    incoming = query.prompt_tokens / query.block_tokens
    prefill = max(0.0, queued + incoming - OVERLAP_CREDIT * candidate.overlap_blocks)
    return PREFILL_SCALE * prefill + candidate.used_blocks
