"""The index against a naive twin: sets of keys per replica."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from events.digest import positions
from events.load import DigestShape
from kvstore.identity import KeyChain
from router.locality.index import DigestIndex
from tests.router.kit import SHAPE, digest_bits, prompt

CHAINS = [prompt((0, 4), (seed, blocks)) for seed, blocks in ((1, 3), (2, 90), (3, 0), (4, 140))]
NOTHING = np.zeros(0, np.uint32)


def spots(keys: KeyChain) -> np.ndarray:
    return np.unique(positions(keys.halves(), SHAPE))


class IndexAgainstTwin(RuleBasedStateMachine):
    """The twin keeps whole chains; the index sees only positions that became set or clear."""

    replicas = st.sampled_from([f"r{number}" for number in range(70)])
    chains = st.sampled_from(CHAINS)

    @initialize()
    def begin(self) -> None:
        self.index = DigestIndex()
        self.held: dict[str, list[KeyChain] | None] = {}

    @rule(replica=replicas)
    def place(self, replica: str) -> None:
        assert self.index.place(replica, "pool", SHAPE)
        self.held.setdefault(replica, None)

    @rule(replica=replicas)
    def remove(self, replica: str) -> None:
        self.index.remove(replica)
        self.held.pop(replica, None)

    @rule(replica=replicas)
    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        if replica in self.held:
            self.held[replica] = None

    @rule(replica=replicas, chains=st.lists(chains, max_size=2))
    def reset(self, replica: str, chains: list[KeyChain]) -> None:
        if replica in self.held:
            self.index.reset(replica, digest_bits(*chains))
            self.held[replica] = list(chains)

    @rule(replica=replicas, keys=chains)
    def store(self, replica: str, keys: KeyChain) -> None:
        if self.held.get(replica) is not None:
            self.index.apply(replica, spots(keys), NOTHING)
            self.held[replica].append(keys)

    @rule(replica=replicas)
    def evict(self, replica: str) -> None:
        if self.held.get(replica):
            gone = self.held[replica].pop()
            left = [spots(keys) for keys in self.held[replica]]
            clear = np.setdiff1d(spots(gone), np.concatenate([NOTHING, *left]))
            self.index.apply(replica, NOTHING, clear)

    @invariant()
    def same_depths(self) -> None:
        for query in CHAINS:
            found = self.index.depths("pool", query.halves())
            truth = {
                replica: max((common(query, keys) for keys in held), default=0)
                for replica, held in self.held.items()
                if held is not None
            }
            assert found == truth
            for replica, depth in truth.items():
                held = self.index.holds(replica, query.halves())
                assert held[:depth].all()
                assert depth == len(query) or not held[depth]
        assert len(self.index) == len(self.held)


def common(a: KeyChain, b: KeyChain) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


TestIndexAgainstTwin = IndexAgainstTwin.TestCase
TestIndexAgainstTwin.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_replica_without_a_digest_is_unknown_not_empty() -> None:
    index = DigestIndex()
    index.place("a", "pool", SHAPE)
    assert not index.known("a")
    assert index.depths("pool", CHAINS[0].halves()) == {}
    index.reset("a", digest_bits())
    assert index.depths("pool", CHAINS[0].halves()) == {"a": 0}


def test_an_empty_chain_has_no_depth() -> None:
    index = DigestIndex()
    index.place("a", "pool", SHAPE)
    index.reset("a", digest_bits(CHAINS[0]))
    assert index.depths("pool", KeyChain(b"", b"").halves()) == {"a": 0}


def test_a_digest_of_another_shape_moves_the_replica() -> None:
    index = DigestIndex()
    big = DigestShape(bits=1 << 17, k=8)
    for shape in (SHAPE, big):
        index.place("a", "pool", shape)
        index.reset("a", digest_bits(CHAINS[0], shape=shape))
    assert index.depths("pool", CHAINS[0].halves()) == {"a": len(CHAINS[0])}
    assert index.nbytes == 8 * big.bits


def test_wrong_sizes_and_positions_are_refused() -> None:
    index = DigestIndex()
    index.place("a", "pool", SHAPE)
    with pytest.raises(ValueError):
        index.reset("a", np.zeros(7, np.uint8))
    with pytest.raises(ValueError):
        index.apply("a", np.array([SHAPE.bits], np.uint32), NOTHING)


def test_R9_memory_is_bounded_and_returns_when_replicas_leave() -> None:
    index = DigestIndex(max_bytes=8 * SHAPE.bits + 100)
    placed = [index.place(f"r{number}", "pool", SHAPE) for number in range(65)]
    assert placed == [True] * 64 + [False]
    assert index.unplaced_total == 1
    for number in range(65):
        index.remove(f"r{number}")
    assert index.nbytes == 0
    assert len(index) == 0


def test_a_full_digest_overestimates_rarely_and_by_little() -> None:
    index = DigestIndex()
    index.place("a", "pool", SHAPE)
    index.reset("a", digest_bits(prompt((9, 4_096))))
    over = [index.depths("pool", prompt((100 + seed, 8)).halves())["a"] for seed in range(1_000)]
    assert sum(depth > 2 for depth in over) == 0
    assert sum(depth > 0 for depth in over) < 20
