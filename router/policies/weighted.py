"""Scores in [0, 1], weighted, behind a filter that sticks to warm replicas: llm-d's scheduler.

Source: llm-d/llm-d-router. The filter is `prefix-cache-affinity-filter` with its defaults (at least
80 % of the prompt cached; kept while the sticky ones' estimated TTFT is not 18 s worse, at 15,928
prefill tokens a second; no exploration); the weights are those of the precise prefix-cache guide:
prefix 3, queue 2, KV utilisation 2. Its queue is what waits by the engine's last metrics; here it
is all that waits, runs or was just sent, which is never late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless

AFFINITY_SHARE = 0.8
MAX_TTFT_PENALTY_S = 18.0
PEAK_PREFILL_TOKENS_PER_S = 15_928.0
PREFIX_WEIGHT = 3.0
QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0


class Weighted(Stateless):
    """Filter, then 3 x prefix share + 2 x shortness of the queue + 2 x free KV; highest wins."""

    name = "weighted"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The best score of those that the filter leaves; ties at random."""
        kept = _sticky(query, candidates)
        loads = [candidate.requests for candidate in kept]
        scores = [_score(query, candidate, min(loads), max(loads)) for candidate in kept]
        highest = max(scores)
        best = [c for c, score in zip(kept, scores, strict=True) if score == highest]
        return Pick(rng.choice(best).replica, f"weighted {highest:.2f}")


def _sticky(query: RouteQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that hold nearly all of the prompt, unless somebody else is far sooner."""
    warm = [c for c in candidates if _prefix(query, c) >= AFFINITY_SHARE]
    if not warm:
        return candidates
    penalty_s = _soonest_s(query, warm) - _soonest_s(query, candidates)
    return warm if penalty_s <= MAX_TTFT_PENALTY_S else candidates


def _soonest_s(query: RouteQuery, candidates: Sequence[Candidate]) -> float:
    return (
        min(
            c.queued_prefill_tokens + query.prompt_tokens - c.overlap_blocks * query.block_tokens
            for c in candidates
        )
        / PEAK_PREFILL_TOKENS_PER_S
    )


def _prefix(query: RouteQuery, candidate: Candidate) -> float:
    return min(1.0, candidate.overlap_blocks * query.block_tokens / query.prompt_tokens)


def _score(query: RouteQuery, candidate: Candidate, least: int, most: int) -> float:
    queue = (most - candidate.requests) / (most - least) if most > least else 1.0
    free = 1.0 - min(1.0, candidate.used_blocks / max(1, candidate.total_blocks))
    return PREFIX_WEIGHT * _prefix(query, candidate) + QUEUE_WEIGHT * queue + KV_WEIGHT * free
