"""Consistent hashing with bounded loads on the prompt's head: locality without any index.

Source: substratusai/kubeai, `internal/loadbalancer/balance_chwbl.go` (Mirrokni et al. 2016): a ring
with 256 virtual nodes for each endpoint; from the hash of the prefix on, the first endpoint whose
load, this request counted, stays within 125 % of the mean. The prefix is the first 100 characters
of the first user message. In blocks of tokens that is one block behind the one that a common system
prompt fills, so two blocks are hashed.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import mmh3

from kvstore.identity import KEY_BYTES
from router.choice.route import RouteQuery
from router.policies.base import Candidates, Pick, Stateless, least_loaded

HEAD_BLOCKS = 2
LOAD_FACTOR = 1.25
VIRTUAL_NODES = 256


class BoundedHash(Stateless):
    """A replica that leaves moves only its own heads."""

    name = "bounded_hash"

    def __init__(self) -> None:
        self._ring = _Ring(())

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick:
        """The first on the ring that has room; a prompt without a block goes by load."""
        blocks = min(HEAD_BLOCKS, len(query.chain))
        if not blocks:
            return Pick(least_loaded(candidates, rng).replica, "no full block to hash")
        head = query.chain.data[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
        bound = LOAD_FACTOR * (1 + sum(c.requests for c in candidates)) / len(candidates)
        order = self._around(candidates.replicas, head)
        own = candidates[next(order)]
        if own.requests + 1 <= bound:
            return Pick(own.replica, "its hash")
        for rank, place in enumerate(order, 1):
            if candidates[place].requests + 1 <= bound:
                return Pick(candidates.replicas[place], f"its hash, {rank} full before")
        return Pick(own.replica, "its hash")

    def _around(self, replicas: Sequence[str], head: bytes) -> Iterator[int]:
        if self._ring.replicas != tuple(replicas):
            self._ring = _Ring(replicas)
        return self._ring.around(head)


class _Ring:
    """Virtual nodes by their hashes."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.replicas = tuple(replicas)
        nodes = sorted(
            (mmh3.hash64(f"{replica}/{number}")[0], place)
            for place, replica in enumerate(replicas)
            for number in range(VIRTUAL_NODES)
        )
        self._hashes = [at for at, _ in nodes]
        self._places = [place for _, place in nodes]

    def around(self, head: bytes) -> Iterator[int]:
        """Places of the replicas as they follow the head's hash, each once."""
        start = bisect_left(self._hashes, mmh3.hash64(head)[0])
        seen: set[int] = set()
        for place in self._places[start:] + self._places[:start]:
            if place not in seen:
                seen.add(place)
                yield place
