"""The replica with the fewest requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless, least_loaded


class LeastLoad(Stateless):
    """Blind to locality: the honest baseline of every comparison."""

    name = "least_load"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The least loaded."""
        return Pick(least_loaded(candidates, rng).replica, "least loaded")
