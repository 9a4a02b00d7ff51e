"""Hits need key, tokens and parent; eviction takes tails first; the journal sees logical copies."""

from __future__ import annotations

import pytest

from configs.schema import Eviction
from events.cache import CacheOp
from events.errors import InvariantError
from replica.cache.invariants import check_cache
from replica.cache.journal import Journal
from replica.cache.node import Node
from replica.cache.pool import BlockPool, BlockState
from replica.cache.prefix import PrefixCache

BLOCK_TOKENS = 2


def block_of(name: str) -> bytes:
    """The token bytes of one block."""
    return name.encode().ljust(4 * BLOCK_TOKENS, b"\0")


class Tables:
    """A cache, and the block tables of its users."""

    def __init__(self, total_blocks: int = 8, eviction: Eviction = "segmented") -> None:
        self.cache = PrefixCache(BlockPool(total_blocks), Journal(), BLOCK_TOKENS, eviction)
        self.tables: dict[str, list[int]] = {}

    def compute(
        self, name: str, words: str, keys: list[bytes] | None = None, tenant: str = "t"
    ) -> list[Node | None]:
        """`name` computes and publishes a block for each letter, sharing nothing."""
        keys = keys or keys_of(words)
        blocks = self.cache.allocate(len(words))
        nodes: list[Node | None] = []
        for key, word, block in zip(keys, words, blocks, strict=True):
            if nodes and nodes[-1] is None:
                break
            parent = nodes[-1] if nodes else None
            nodes.append(self.cache.publish(parent, key, block_of(word), block, tenant))
        self.tables[name] = blocks
        self.check()
        return nodes

    def hit(self, name: str, words: str, keys: list[bytes] | None = None, tenant: str = "t") -> int:
        """`name` takes a lease on what is cached of the words; returns how much that is."""
        tokens = b"".join(block_of(word) for word in words)
        with self.cache.lookup(keys or keys_of(words), tokens, len(words)) as lease:
            self.tables[name] = lease.take(tenant)[0]
        self.check()
        return len(self.tables[name])

    def leave(self, name: str) -> None:
        self.cache.release(self.tables.pop(name))
        self.check()

    def evict(self, blocks: int) -> None:
        """Make room as a newcomer would."""
        free = self.cache.pool.count(BlockState.FREE)
        for block in self.cache.allocate(free + blocks):
            self.cache.pool.free(block)
        self.check()

    def check(self) -> None:
        check_cache(self.cache, list(self.tables.values()))

    def facts(self) -> list[tuple[CacheOp, bytes]]:
        return [(op, key) for op, key in self.cache.journal.drain()]


def keys_of(words: str) -> list[bytes]:
    """A chained key per letter: the prefix itself."""
    return [words[: end + 1].encode() for end in range(len(words))]


def test_the_longest_prefix_is_found_while_in_use_and_after() -> None:
    tables = Tables()
    tables.compute("r1", "abc")
    assert tables.hit("r2", "abx") == 2
    tables.leave("r1")
    tables.leave("r2")
    assert tables.cache.pool.count(BlockState.CACHED) == 3
    assert tables.hit("r3", "abcd") == 3
    assert tables.cache.pool.count(BlockState.CACHED) == 0


def test_a_lease_that_is_not_taken_is_given_back() -> None:
    tables = Tables()
    tables.compute("r1", "ab")
    tables.leave("r1")
    tokens = block_of("a") + block_of("b")
    with tables.cache.lookup(keys_of("ab"), tokens, 2) as lease:
        assert len(lease) == 2
        assert tables.cache.available == 6
        assert tables.cache.open_leases == 1
    tables.check()
    assert tables.cache.available == 8
    with pytest.raises(InvariantError):
        lease.take("t")


def test_c2_equal_keys_are_not_enough() -> None:
    same = [b"key"] * 2
    tables = Tables()
    first = tables.compute("r1", "a", same[:1])
    assert tables.compute("r2", "b", same[:1]) == [None]
    assert tables.cache.collisions == 1
    assert tables.hit("r3", "b", same[:1]) == 0
    assert tables.hit("r4", "a", same[:1]) == 1
    # Right key and tokens, but behind another block than the one that matched.
    keys = keys_of("ab")
    other = tables.cache.publish(None, b"x", block_of("x"), tables.cache.allocate(1)[0], "t")
    assert other is not None
    block = tables.cache.allocate(1)[0]
    assert tables.cache.publish(other, keys[1], block_of("b"), block, "t") is not None
    tables.tables["r5"] = [*other.copies, block]
    assert tables.hit("r6", "ab", [b"key", keys[1]]) == 1
    assert first[0] is not None


def test_c9_tails_go_before_heads_and_the_least_used_first() -> None:
    tables = Tables(total_blocks=7)
    tables.compute("old", "abc")
    tables.compute("new", "axy", [b"a", b"ax", b"axy"])
    tables.leave("old")
    tables.leave("new")
    tables.facts()
    tables.evict(1)
    tables.evict(1)
    tables.evict(1)
    assert [key for _, key in tables.facts()] == [b"abc", b"ab", b"axy"]
    tables.evict(2)
    assert [key for _, key in tables.facts()] == [b"ax", b"a"]
    assert tables.cache.nodes() == {}


def test_a_used_prefix_survives_while_its_old_tail_goes() -> None:
    tables = Tables(total_blocks=4)
    tables.compute("r1", "abc")
    tables.leave("r1")
    assert tables.hit("r2", "ab") == 2
    tables.evict(1)
    assert tables.hit("r3", "abc") == 2
    with pytest.raises(InvariantError):
        tables.evict(1)


def test_e6_removed_is_said_only_after_the_last_copy() -> None:
    tables = Tables()
    tables.compute("r1", "ab")
    tables.compute("r2", "ab")
    assert tables.facts() == [(CacheOp.STORED, b"a"), (CacheOp.STORED, b"ab")]
    tables.leave("r1")
    assert tables.cache.pool.count(BlockState.FREE) == 6
    assert tables.facts() == []
    tables.leave("r2")
    assert tables.cache.pool.count(BlockState.CACHED) == 2
    assert tables.facts() == []
    tables.evict(2)
    assert tables.facts() == [(CacheOp.REMOVED, b"ab"), (CacheOp.REMOVED, b"a")]


def test_e6_a_fresh_copy_takes_the_place_of_an_idle_one() -> None:
    tables = Tables()
    tables.compute("r1", "a")
    tables.leave("r1")
    tables.compute("r2", "a")
    assert tables.cache.pool.count(BlockState.CACHED) == 0
    assert tables.cache.pool.count(BlockState.FREE) == 7
    tables.leave("r2")
    assert tables.hit("r3", "a") == 1
    assert tables.facts() == [(CacheOp.STORED, b"a")]


def test_clear_keeps_what_is_leased() -> None:
    tables = Tables()
    tables.compute("r1", "abc")
    tables.compute("r2", "x", [b"x"])
    tables.leave("r1")
    tables.facts()
    assert tables.cache.clear() == 3
    tables.check()
    assert {op for op, _ in tables.facts()} == {CacheOp.REMOVED}
    assert tables.hit("r3", "x", [b"x"]) == 1
    tables.leave("r2")
    tables.leave("r3")
    assert tables.cache.clear() == 1
    assert tables.facts() == [(CacheOp.CLEARED, b"")]


def test_what_is_given_back_during_a_plan_is_fenced_and_what_nobody_uses_is_not() -> None:
    tables = Tables()
    tables.compute("r1", "ab")
    tables.leave("r1")
    private = tables.cache.allocate(1)
    tables.cache.pool.raise_fence(1)
    tables.cache.clear()
    assert tables.cache.available == 7
    tables.cache.release(private)
    assert tables.cache.pool.count(BlockState.FENCED) == 1
    assert tables.cache.available == 7
    tables.cache.pool.lower_fence(1)
    assert tables.cache.available == 8
