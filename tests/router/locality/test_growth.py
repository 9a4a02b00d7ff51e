"""A digest that fills up: from a replica's journal over the feed to the router's index."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from events.cache import CacheFact, CacheOp
from events.feed import Feed
from events.load import DigestShape
from events.memory import MemoryBus, MemoryHub
from kvstore.identity import KeyChain
from replica.publish import Publisher
from replica.residency import FALSE_POSITIVE_BOUND
from router.fleet.fleet import Fleet
from router.locality.index import DigestIndex
from tests.events.helpers import CLUSTER, ListEngine, config, settle
from tests.router.kit import EXPECTED, POOL, Clock, hello, prompt

SMALL = DigestShape(bits=4_096, k=8)
LONG = prompt((1, 2_000))
SHORT = prompt((2, 100))


class Wire:
    """One replica's publisher, the bus, the feed, and the fleet that listens to it."""

    def __init__(self, index: DigestIndex | None = None) -> None:
        self.clock, self.hub, self.engine = Clock(), MemoryHub(), ListEngine()
        self.fleet = Fleet(EXPECTED, self.clock, index)
        self.feed = Feed(MemoryBus(self.hub), CLUSTER, self.fleet, self.clock)
        greeting = hello(digest=SMALL)
        args = (CLUSTER, "r0", greeting, self.engine, config(), 1, self.clock)
        self.publisher = Publisher(MemoryBus(self.hub), *args)

    async def open(self) -> None:
        await self.feed.start()
        await self.publisher.start()
        await self.calm()

    async def calm(self) -> None:
        for _ in range(20):
            self.clock.pass_s(0.25)
            await self.publisher.tick()
            await settle()
            await self.feed.sweep()
            await settle()

    async def tell(self, op: CacheOp, chain: KeyChain) -> None:
        self.engine.facts = [CacheFact(op, key) for key in chain]
        await self.calm()

    def depth(self, chain: KeyChain) -> int | None:
        return self.fleet.index.depths(POOL, chain.halves()).get("r0")

    def measured(self) -> float:
        for _ in range(200):
            self.fleet.false_hits.probe(self.fleet.index)
        rate = self.fleet.false_hits.rate("r0")
        assert rate is not None
        return rate


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    await wire.open()
    yield wire
    await wire.publisher.close()
    await wire.feed.close()


async def test_a_digest_that_passes_its_bound_grows_and_its_column_moves(wire: Wire) -> None:
    await wire.tell(CacheOp.STORED, SHORT)
    assert wire.depth(SHORT) == len(SHORT)
    before = wire.fleet.index.nbytes
    await wire.tell(CacheOp.STORED, LONG)
    residency = wire.publisher.residency
    assert residency.generation > 1
    assert residency.false_positive_rate <= FALSE_POSITIVE_BOUND
    assert wire.fleet.index.nbytes == before * residency.shape.bits // SMALL.bits
    assert (wire.depth(SHORT), wire.depth(LONG)) == (len(SHORT), len(LONG))
    assert wire.measured() <= 5 * FALSE_POSITIVE_BOUND
    await wire.tell(CacheOp.REMOVED, LONG)
    assert (wire.depth(SHORT), wire.depth(LONG)) == (len(SHORT), 0)
    wire.fleet.false_hits.forget("r0")  # what the fuller digest claimed fades only slowly
    assert wire.measured() == 0.0
    assert list(wire.fleet.alarms) == []


async def test_R9_growth_beyond_the_indexs_memory_costs_locality_and_is_named() -> None:
    wire = Wire(DigestIndex(max_bytes=8 * SMALL.bits))
    await wire.open()
    await wire.tell(CacheOp.STORED, LONG)
    assert wire.depth(LONG) is None
    assert "index_full" in {alarm.name for alarm in wire.fleet.alarms}
    (view,) = wire.fleet.replicas()
    assert (view.locality, view.digest_known) == ("unknown", False)
    await wire.publisher.close()
    await wire.feed.close()
