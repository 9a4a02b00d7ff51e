"""Consistent hashing of the prompt's head with bounded loads: locality without any index."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import mmh3

from kvstore.identity import KEY_BYTES
from router.policies.base import Candidate, Pick, Stateless, least_loaded
from router.route import RouteQuery

HEAD_BLOCKS = 16
LOAD_FACTOR = 1.25


class BoundedHash(Stateless):
    """Rendezvous order of the replicas by the hash of the head; the first one whose load stays
    within `LOAD_FACTOR` times the mean takes it. A replica that leaves moves only its own heads."""

    name = "bounded_hash"

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The first in rendezvous order that has room; a prompt without a block goes by load."""
        blocks = min(HEAD_BLOCKS, len(query.chain))
        if not blocks:
            return Pick(least_loaded(candidates, rng), "no full block to hash")
        head = query.chain.data[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
        total = 1 + sum(candidate.requests for candidate in candidates)
        bound = math.ceil(LOAD_FACTOR * total / len(candidates))
        order = sorted(candidates, key=lambda candidate: _weight(head, candidate), reverse=True)
        for rank, candidate in enumerate(order):
            if candidate.requests + 1 <= bound:
                return Pick(candidate, "its hash" if not rank else f"its hash, {rank} full before")
        return Pick(order[0], "its hash")


def _weight(head: bytes, candidate: Candidate) -> tuple[int, str]:
    return mmh3.hash64(head + candidate.replica.encode())[0], candidate.replica
