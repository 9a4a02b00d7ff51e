"""Any replica."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless


class Random(Stateless):
    """Uniform."""

    name = "random"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """Any."""
        return Pick(rng.choice(candidates).replica, "at random")
