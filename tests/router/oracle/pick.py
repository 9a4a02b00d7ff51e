"""The default policy over a plain list: what router/policies/warmroute.py must agree with."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Pick
from router.policies.heat import WINDOW_REQUESTS, PlainHeat
from tests.router.oracle.score import Candidate

TIE_MS = 1.0
TIE_SHARE = 0.02
"""Scores closer than this share of the prompt's prefill are no difference that can be known."""


class Warmroute:
    """Highest score wins. Ties go to whoever got fewer of the last requests, then at random."""

    name = "warmroute"

    def __init__(self) -> None:
        self._heat = PlainHeat()
        self._recent: deque[str] = deque(maxlen=WINDOW_REQUESTS)
        self._placed: Counter[str] = Counter()

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The best score, unless its hot prefix deserves one more holder that waits no longer."""
        best = self._best(candidates, rng, at_home=True)
        spread = self._new_holder(query, candidates, best, rng)
        if spread is not None:
            return Pick(spread.replica, "one more holder for a hot prefix")
        if not best.overlap_blocks:
            return Pick(best.replica, "cold: least cost")
        longest = _longest(candidates)
        return Pick(
            best.replica, "warm" if best.overlap_blocks == longest else "less warm, but sooner"
        )

    def placed(self, query: RouteQuery, candidates: Sequence[Candidate], pick: Pick) -> None:
        """Remember the prefix and the place."""
        self._heat.note(query.chain, _longest(candidates))
        if len(self._recent) == self._recent.maxlen:
            self._placed[self._recent[0]] -= 1
        self._recent.append(pick.replica)
        self._placed[pick.replica] += 1

    def _best(
        self, candidates: Sequence[Candidate], rng: random.Random, at_home: bool = False
    ) -> Candidate:
        top = max(candidates, key=lambda candidate: candidate.terms.score)
        margin = max(TIE_MS, TIE_SHARE * (top.terms.saved_prefill_ms + top.terms.prefill_ms))
        tied = [c for c in candidates if top.terms.score - c.terms.score <= margin]
        most = _longest(tied)
        home = [c for c in tied if c.overlap_blocks == most and not c.terms.transfer_ms]
        if at_home and most and any(c.terms.transfer_ms for c in tied):
            tied = home or tied
        fewest = min(self._placed[c.replica] for c in tied)
        return rng.choice([c for c in tied if self._placed[c.replica] == fewest])

    def _new_holder(
        self,
        query: RouteQuery,
        candidates: Sequence[Candidate],
        best: Candidate,
        rng: random.Random,
    ) -> Candidate | None:
        shared = _longest(candidates)
        deserved = self._heat.holders_deserved(query.chain, shared, len(candidates))
        others = [c for c in candidates if c.overlap_blocks < shared]
        if best in others or len(candidates) - len(others) >= deserved:
            return None
        other = self._best(others, rng)
        return other if _waiting_ms(other) <= _waiting_ms(best) + TIE_MS else None


def _waiting_ms(candidate: Candidate) -> float:
    terms = candidate.terms
    return terms.queue_ms + terms.overload_ms + terms.lateness_ms


def _longest(candidates: Sequence[Candidate]) -> int:
    return max(candidate.overlap_blocks for candidate in candidates)
