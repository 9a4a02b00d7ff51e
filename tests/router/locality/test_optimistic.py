"""What was promised: the radix tree against a list of all promises, in any order of events."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.identity import KeyChain
from router.locality.optimistic import OptimisticEntries
from router.locality.promises import PlainTree, promise_tree
from tests.router.kit import World, promised, prompt

REPLICAS = [f"r{number}" for number in range(5)]
PARTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=0, max_size=4)


def chain_of(parts: list[tuple[int, int]]) -> KeyChain:
    """A chain whose keys name the whole way to them, as real ones do."""
    way, keys = b"", []
    for seed, blocks in parts:
        for _ in range(blocks):
            way += bytes([seed])
            keys.append(hashlib.blake2b(way, digest_size=16).digest())
    return KeyChain(b"".join(keys), b"")


def agreement(one: KeyChain, other: KeyChain) -> int:
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return depth


class PromisesAgainstTwin(RuleBasedStateMachine):
    """The twin keeps every promise whole: (replica, chain, until). Both trees are held to it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [OptimisticEntries(tree=tree) for tree in (promise_tree(), PlainTree())]
        self.twin: dict[str, tuple[str, KeyChain, float]] = {}
        self.now_s = 0.0
        self.made = 0

    @rule(replica=st.sampled_from(REPLICAS), parts=PARTS, ttl_s=st.sampled_from([1.0, 5.0, 60.0]))
    def remember(self, replica: str, parts: list[tuple[int, int]], ttl_s: float) -> None:
        self.made += 1
        chain = chain_of(parts)
        for entries in self.both:
            entries.remember(replica, f"d{self.made}", chain, self.now_s + ttl_s)
        if len(chain):
            self.twin[f"d{self.made}"] = (replica, chain, self.now_s + ttl_s)

    @rule(pick=st.integers(0, 100))
    def forget_decision(self, pick: int) -> None:
        for entries in self.both:
            entries.forget_decision(f"d{pick}")
        self.twin.pop(f"d{pick}", None)

    @rule(replica=st.sampled_from(REPLICAS))
    def forget_replica(self, replica: str) -> None:
        for entries in self.both:
            entries.forget_replica(replica)
        self.twin = {name: kept for name, kept in self.twin.items() if kept[0] != replica}

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for entries in self.both:
            entries.expire(self.now_s)
        self.twin = {name: kept for name, kept in self.twin.items() if kept[2] > self.now_s}

    @rule(parts=PARTS)
    def look_up(self, parts: list[tuple[int, int]]) -> None:
        chain = chain_of(parts)
        expected: dict[str, int] = {}
        for replica, held, _ in self.twin.values():
            expected[replica] = max(expected.get(replica, 0), agreement(held, chain))
        expected = {replica: depth for replica, depth in expected.items() if depth}
        for entries in self.both:
            assert promised(entries, chain) == expected

    @invariant()
    def keeps_each_key_once(self) -> None:
        keys = {key for _, held, _ in self.twin.values() for key in held}
        for entries in self.both:
            assert entries.promises == len(self.twin)
            assert len(entries) == len(keys)

    def teardown(self) -> None:
        for entries in self.both:
            for replica in REPLICAS:
                entries.forget_replica(replica)
            assert len(entries) == 0
            assert set(entries.slots) <= {None}


TestPromises = PromisesAgainstTwin.TestCase
TestPromises.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_R9_promises_are_bounded_for_each_replica_and_in_all() -> None:
    entries = OptimisticEntries(per_replica=3, in_all=5, max_keys=12)
    chains = [chain_of([(0, 1), (1, 1), (2, number)]) for number in range(1, 9)]
    for number, chain in enumerate(chains[:4]):
        entries.remember("a", f"a{number}", chain, 9.0)
    assert entries.promises == 3
    for number, chain in enumerate(chains[:4]):
        entries.remember(f"b{number}", f"b{number}", chain, 9.0)
    assert (entries.promises, entries.dropped_total) == (5, 3)
    entries.remember("c", "c", chain_of([(1, 12)]), 9.0)
    assert len(entries) == 12
    assert promised(entries, chains[0]) == {}


def test_forgotten_promises_leave_nothing_behind() -> None:
    entries = OptimisticEntries()
    for number in range(1_000):
        entries.remember("a", f"d{number}", chain_of([(0, 3), (number % 3, 2)]), 1e9)
        entries.forget_decision(f"d{number}")
    assert (entries.promises, len(entries)) == (0, 0)
    assert len(entries._expiries) < 100


def test_a_promise_outlives_another_ones_failure() -> None:
    world = World(1)
    first, second = (world.decide(prompt((1, 8))) for _ in range(2))
    world.end(second, "transport")
    assert world.decide(prompt((1, 8))).predicted_cached_tokens == 128
    assert first.replica == second.replica


def test_a_digest_that_holds_more_than_was_promised_counts() -> None:
    world = World(1)
    world.decide(prompt((1, 8)))
    world.hold("r0", prompt((1, 8), (2, 8)))
    assert world.decide(prompt((1, 8), (2, 9))).predicted_cached_tokens == 16 * 16
    assert world.decide(prompt((1, 8), (2, 9))).predicted_cached_tokens == 17 * 16
