"""The eviction orders of runs are those of single nodes, whatever shares, leaves and is evicted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from configs.schema import Eviction
from events.errors import InvariantError
from replica.cache.idle import IdleNodes
from replica.cache.node import Node
from tests.replica.cache.plain_orders import PlainIdle
from tests.replica.cache.test_prefix import Tables, block_of, keys_of

BLOCKS = 24


class Watched(IdleNodes):
    """Every change is made to the plain orders too."""

    def __init__(self, eviction: Eviction, total_blocks: int) -> None:
        super().__init__(eviction, total_blocks)
        self.plain = PlainIdle(eviction, total_blocks)

    def push(self, nodes: Sequence[Node]) -> None:
        super().push(nodes)
        self.plain.push(nodes)

    def reuse(self, nodes: Sequence[Node]) -> None:
        self.plain.remove(nodes)
        super().reuse(nodes)

    def pop(self) -> Node:
        node = super().pop()
        self.plain.remove((node,))
        return node

    def compare(self) -> None:
        assert self.nodes() == self.plain.nodes()
        assert self.nodes_of() == self.plain.nodes_of()


class Traffic(Tables):
    """Several at once come, find, compute what they don't find (perhaps what others compute too),
    and leave in any order. `last` is what the words were found to have in the cache once."""

    def __init__(self, eviction: Eviction, rng: random.Random) -> None:
        super().__init__(BLOCKS, eviction)
        self.idle = Watched(eviction, BLOCKS)
        self.cache._idle = self.idle
        self.rng = rng
        self.said = ["".join(rng.choice("ab") for _ in range(12)) for _ in range(4)]
        self.last: dict[str, Node] = {}

    def come(self, name: str) -> None:
        rng = self.rng
        words = rng.choice(self.said)[: rng.randint(1, 12)]
        tenant, keys = rng.choice("xyz"), keys_of(words)
        tokens = b"".join(map(block_of, words))
        limit = rng.choice((len(words), len(words), rng.randint(0, len(words))))
        fresh = self.cache.match(keys, tokens, limit)
        with self.cache.lookup(keys, tokens, limit, self.last.get(words)) as lease:
            assert (lease.nodes[-1] if lease.nodes else None) is fresh
            if lease.nodes:
                self.last[words] = lease.nodes[-1]
            missing = words[len(lease) :]
            if len(missing) > self.cache.available:
                return
            blocks, nodes = lease.take(tenant, again=rng.random() < 0.3)
            blocks += self.cache.allocate(len(missing))
        self.tables[name] = blocks
        parent = nodes[-1] if nodes else None
        for place in range(len(nodes), len(words) - (rng.random() < 0.3)):
            word = block_of(words[place])
            parent = self.cache.publish(parent, keys[place], word, blocks[place], tenant)

    def step(self, number: int) -> None:
        kind = self.rng.random()
        if kind < 0.5:
            self.come(f"r{number}")
        elif kind < 0.9 and self.tables:
            self.leave(self.rng.choice(list(self.tables)))
        elif kind < 0.99:
            self.evict(self.rng.randint(0, min(4, len(self.idle))))
        else:
            self.cache.clear()
        self.idle.compare()
        self.check()


@pytest.mark.parametrize("eviction", ["segmented", "lru"])
@pytest.mark.parametrize("seed", range(3))
def test_C9_runs_keep_the_order_of_single_nodes(eviction: Eviction, seed: int) -> None:
    traffic = Traffic(eviction, random.Random(seed))
    for number in range(250):
        traffic.step(number)
    assert any(node.reused for node in traffic.cache.nodes().values())


def test_what_is_not_idle_can_not_leave_an_order() -> None:
    tables = Tables()
    tables.compute("r", "abc")
    tables.leave("r")
    nodes = [tables.cache.nodes()[key] for key in keys_of("abc")]
    idle = tables.cache.idle
    for wrong in (nodes[1:], nodes[2:]):
        with pytest.raises(InvariantError):
            idle.reuse(wrong)
    idle.reuse(nodes[:2])
    for wrong in (nodes[:2], nodes[:1]):
        with pytest.raises(InvariantError):
            idle.reuse(wrong)
    assert idle.pop() is nodes[2]
    with pytest.raises(InvariantError):
        idle.reuse(nodes[2:])


def test_what_was_found_and_evicted_meanwhile_is_not_found_again() -> None:
    tables = Tables()
    tables.compute("r", "abc")
    tables.leave("r")
    tokens, keys = b"".join(map(block_of, "abc")), keys_of("abc")
    found = tables.cache.match(keys, tokens, 3)
    assert found is not None
    assert found.depth == 2
    tables.cache.clear()
    tables.compute("r", "ab")
    with tables.cache.lookup(keys, tokens, 3, found) as lease:
        assert [node.key for node in lease.nodes] == keys[:2]
        assert found.parent not in lease.nodes
