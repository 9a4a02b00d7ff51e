"""Exploit what is cached or explore where there is room: the E2 rule of Preble.

Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (ICLR
2025), algorithms 1 and 2. More of the prompt cached than not: to its least loaded holder, unless
that one is the heaviest by far (1.5 times the lightest, which then takes it). Else: the least load
of a past window, plus what would be evicted, plus the prefill. A request's share of the load is its
uncached prefill and the decoding of 45 tokens. The window is 3 minutes there; rules here know no
clock, so it is the last 512 requests. Times of prefills come from the replicas' fits rather than
from a regression made beforehand, a token decoded counts 20 ms rather than the median of those
measured, and the eviction's is our own term.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from router.choice.route import RouteQuery
from router.choice.sheet import TERMS
from router.policies.base import Candidates, Pick

WINDOW_REQUESTS = 512
IMBALANCE = 1.5
OUTPUT_TOKENS = 45
TOKEN_MS = 20.0

_PREFILL, _EVICTION = map(TERMS.index, ("prefill_ms", "eviction_ms"))


class Preble:
    """Remembers what was placed where, in ms of work."""

    name = "preble"

    def __init__(self) -> None:
        self._recent: deque[tuple[str, float]] = deque(maxlen=WINDOW_REQUESTS)
        self._placed_ms: Counter[str] = Counter()

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick:
        """Ties at random."""
        loads = np.array([self._placed_ms[replica] for replica in candidates.replicas])
        matched = candidates.longest_blocks * query.block_tokens
        if matched <= query.prompt_tokens - matched:
            costs = loads + candidates.terms[:, [_PREFILL, _EVICTION]].sum(axis=1)
            return Pick(candidates.replicas[_least(costs, rng)], "explored")
        holders = np.flatnonzero(candidates.overlaps == candidates.longest_blocks)
        holder = int(holders[_least(loads[holders], rng)])
        if loads[holder] == loads.max() and loads[holder] > IMBALANCE * loads.min():
            return Pick(candidates.replicas[_least(loads, rng)], "off the heaviest")
        return Pick(candidates.replicas[holder], "exploited")

    def placed(self, query: RouteQuery, candidates: Candidates, pick: Pick) -> None:
        """The work goes into the window; the oldest leaves it."""
        if len(self._recent) == self._recent.maxlen:
            self._forget(*self._recent[0])
        place = candidates.replicas.index(pick.replica)
        ms = float(candidates.terms[place, _PREFILL]) + OUTPUT_TOKENS * TOKEN_MS
        self._recent.append((pick.replica, ms))
        self._placed_ms[pick.replica] += ms

    def _forget(self, replica: str, ms: float) -> None:
        self._placed_ms[replica] -= ms
        if self._placed_ms[replica] < 1e-6:
            del self._placed_ms[replica]


def _least(costs: np.ndarray, rng: random.Random) -> int:
    return int(rng.choice(np.flatnonzero(costs == costs.min()).tolist()))
