"""The lesser of two at random: Mitzenmacher's two choices, the `power_of_two` of SGLang's gateway.

Source: sgl-project/sglang, `sgl-model-gateway` (`policies/power_of_two.rs`); load is the number of
requests in flight. No parameters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick, Stateless


class PowerOfTwo(Stateless):
    """Two different candidates are drawn; the one with fewer requests takes it."""

    name = "power_of_two"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The first of the two where both have as many."""
        drawn = rng.sample(range(len(candidates)), min(2, len(candidates)))
        lesser = min((candidates[place] for place in drawn), key=lambda c: c.requests)
        return Pick(lesser.replica, "the lesser of two")
