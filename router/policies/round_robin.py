"""Each replica in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick


class RoundRobin:
    """By id, behind the one that was last: a replica that comes or goes disturbs nobody's turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The next id in order."""
        ordered = sorted(candidates, key=lambda candidate: candidate.replica)
        later = (candidate for candidate in ordered if candidate.replica > self._last)
        return Pick(next(later, ordered[0]).replica, "its turn")

    def placed(self, query: RouteQuery, candidates: Sequence[Candidate], pick: Pick) -> None:
        """The turn is taken."""
        self._last = pick.replica
