"""The default policy: the least predicted cost in milliseconds, and a guard for hot prefixes."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from router.choice.route import RouteQuery
from router.choice.sheet import TERMS
from router.policies.base import Candidates, Pick
from router.policies.heat import WINDOW_REQUESTS, prefix_heat

TIE_MS = 1.0
TIE_SHARE = 0.02
"""Scores closer than this share of the prompt's prefill are no difference that can be known."""


_SAVED, _PREFILL, _TRANSFER, _OVERLAP = map(
    TERMS.index, ("saved_prefill_ms", "prefill_ms", "transfer_ms", "overlap_blocks")
)
_WAITING = [TERMS.index(name) for name in ("queue_ms", "overload_ms", "lateness_ms")]


class Warmroute:
    """Highest score wins. Ties go to whoever needs no transfer, as a copy takes memory; then to
    whoever got fewer of the last requests, then at random."""

    name = "warmroute"

    def __init__(self) -> None:
        self._heat = prefix_heat()
        self._recent: deque[str] = deque(maxlen=WINDOW_REQUESTS)
        self._placed: Counter[str] = Counter()

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick:
        """The best score, unless its hot prefix deserves one more holder that waits no longer."""
        best, longest = candidates.best, candidates.longest_blocks
        place, overlap = int(best.place), best.overlap_blocks
        enough = best.score - _margin_ms(best.saved_prefill_ms, best.prefill_ms)
        if best.runner_up >= enough:
            tied = candidates.at_least(enough)
            place = self._choice(candidates, _at_home(candidates, tied), rng)
            overlap = float(candidates.terms[place, _OVERLAP])
        if overlap == longest > 0 and self._heat.hot(query.chain, longest):
            other = self._new_holder(query, candidates, place, rng)
            if other is not None:
                return Pick(candidates.replicas[other], "one more holder for a hot prefix")
        replica = candidates.replicas[place]
        if not overlap:
            return Pick(replica, "cold: least cost")
        return Pick(replica, "warm" if overlap == longest else "less warm, but sooner")

    def placed(self, query: RouteQuery, candidates: Candidates, pick: Pick) -> None:
        """Remember the prefix and the place."""
        self._heat.note(query.chain, candidates.longest_blocks)
        if len(self._recent) == self._recent.maxlen:
            self._placed[self._recent[0]] -= 1
        self._recent.append(pick.replica)
        self._placed[pick.replica] += 1

    def _choice(self, candidates: Candidates, tied: list[int], rng: random.Random) -> int:
        """One of those who got fewest of the last requests."""
        if len(tied) > 1:
            replicas, placed = candidates.replicas, self._placed
            counts = [placed.get(replicas[place], 0) for place in tied]
            fewest = min(counts)
            tied = [place for place, count in zip(tied, counts, strict=True) if count == fewest]
        return rng.choice(tied) if len(tied) > 1 else tied[0]

    def _new_holder(
        self, query: RouteQuery, candidates: Candidates, best: int, rng: random.Random
    ) -> int | None:
        """The place of one more holder of the prefix, of which the best one has all that anybody
        has."""
        shared = candidates.longest_blocks
        deserved = self._heat.holders_deserved(query.chain, shared, len(candidates))
        others = np.flatnonzero(candidates.overlaps < shared)
        if len(candidates) - len(others) >= deserved:
            return None
        scores = candidates.scores[others]
        first = int(scores.argmax())
        saved_ms, prefill_ms = candidates.terms[others[first], [_SAVED, _PREFILL]].tolist()
        enough = scores[first] - _margin_ms(saved_ms, prefill_ms)
        other = self._choice(candidates, others[scores >= enough].tolist(), rng)
        waits_longer = _waiting_ms(candidates, other) > _waiting_ms(candidates, best) + TIE_MS
        return None if waits_longer else other


def _at_home(candidates: Candidates, tied: list[int]) -> list[int]:
    """Of the tied places those that hold the most themselves, where the others would fetch it.
    Where nobody would, a tie is one: siblings of a cold prefix are to start it in many places."""
    if len(tied) < 2 or not (candidates.longest_blocks and candidates.may_fetch):
        return tied
    transfers = candidates.terms[:, _TRANSFER].take(tied).tolist()
    if not any(transfers):
        return tied
    overlaps = candidates.terms[:, _OVERLAP].take(tied).tolist()
    home, most = zip(tied, transfers, overlaps, strict=True), max(overlaps)
    return [place for place, transfer, held in home if not transfer and held == most] or tied


def _margin_ms(saved_ms: float, prefill_ms: float) -> float:
    margin_ms = TIE_SHARE * (saved_ms + prefill_ms)
    return margin_ms if margin_ms > TIE_MS else TIE_MS


def _waiting_ms(candidates: Candidates, place: int) -> float:
    return float(candidates.terms[place, _WAITING].sum())
