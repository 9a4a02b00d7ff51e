"""The publisher by itself: what it says, when, and what it keeps for readers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from events.cache import CacheFact, CacheOp
from events.digest import MAX_DIGEST_BITS, halves_of, positions
from events.envelope import Envelope, unseal
from events.errors import WireError
from events.feed import Feed
from events.load import (
    AdapterNote,
    DigestShape,
    FetchFit,
    ReplicaHello,
    ReplicaLoad,
    WarmBlocks,
)
from events.memory import MemoryBus
from events.secrets import tenant_tag
from events.snapshot import SnapshotChunk, SnapshotRequest, decode_chunk
from events.subjects import replica_subject, roll_call_subject, snapshot_subject, split
from events.wire import encode
from replica.engine.messages import AdapterState
from replica.publish import Publisher
from replica.residency import Residency
from tests.events.helpers import (
    CLUSTER,
    Clock,
    ListEngine,
    MirrorListener,
    config,
    engine_load,
    hello,
    key,
    removed,
    settle,
    stored,
)
from tests.events.world import WIDE
from tests.waiting import until

SECRET = b"\3" * 32
MANY_CHUNKS = DigestShape(bits=1 << 21, k=8)


class Ear:
    """Hears everything of one publisher that only beats when told to."""

    def __init__(self, shape: DigestShape = WIDE, secret: bytes | None = None) -> None:
        self.bus, self.engine, self.clock = MemoryBus(), ListEngine(), Clock()
        self.heard: list[tuple[str, Envelope]] = []
        parts = (self.bus, CLUSTER, "r0", hello(shape), self.engine, config(), 7, self.clock)
        self.publisher = Publisher(*parts, secret=secret)

    async def start(self) -> None:
        await self.bus.subscribe(replica_subject(CLUSTER, "*", "*"), self._hear)
        await self.publisher.start()
        assert self.publisher._task
        self.publisher._task.cancel()
        await settle()

    async def beat(self, seconds: float) -> list[str]:
        """The kinds of message that this beat brought."""
        before = len(self.heard)
        self.clock.now_s += seconds
        await self.publisher.tick()
        await settle()
        return [kind for kind, _ in self.heard[before:]]

    async def chunk(self, request: SnapshotRequest) -> SnapshotChunk:
        reply = await self.bus.request(snapshot_subject(CLUSTER, "r0"), encode(request), 1.0)
        return decode_chunk(bytes(unseal(reply).payload))

    def last(self, kind: str, form: type) -> object:
        payloads = [envelope.payload for heard, envelope in self.heard if heard == kind]
        return msgspec.msgpack.decode(payloads[-1], type=form)

    def _hear(self, subject: str, payload: bytes) -> None:
        self.heard.append((split(subject)[2], unseal(payload)))


@pytest.fixture
async def ear() -> AsyncIterator[Ear]:
    ear = Ear()
    await ear.start()
    yield ear
    await ear.publisher.close()


async def test_it_starts_with_hello_and_load(ear: Ear) -> None:
    assert [kind for kind, _ in ear.heard] == ["hello", "load"]
    assert {(e.sender, e.boot, e.generation, e.seq) for _, e in ear.heard} == {("r0", 7, 1, 0)}
    assert ear.last("hello", ReplicaHello) == hello(WIDE)


async def test_an_idle_replica_says_little_and_a_busy_one_more(ear: Ear) -> None:
    said = [kind for _ in range(100) for kind in await ear.beat(0.1)]
    assert said.count("load") == 10
    assert said.count("hello") == 5
    assert said.count("digest") == 0
    ear.engine.now = engine_load(running=1)
    said = [kind for _ in range(100) for kind in await ear.beat(0.1)]
    assert 30 <= said.count("load") <= 40


async def test_only_net_changes_are_told(ear: Ear) -> None:
    ear.engine.facts = stored(1, 2) + removed(2)
    assert await ear.beat(0.01) == ["digest"]
    ear.engine.facts = removed(1) + stored(1)
    assert await ear.beat(0.01) == []
    assert ear.publisher.residency.seq == 1


async def test_a_load_report_says_where_the_digest_stands(ear: Ear) -> None:
    ear.engine.facts = stored(1)
    ear.engine.now = engine_load(running=3, seen={"router": 9}, cached_blocks=1)
    await ear.beat(2.0)
    load = ear.last("load", ReplicaLoad)
    assert isinstance(load, ReplicaLoad)
    assert (load.digest_generation, load.digest_seq, load.running) == (1, 1, 3)
    assert load.seen == {"router": 9}
    assert load.digest_false_positive_rate > 0


async def test_S6_a_load_report_says_which_tenants_hold_how_much_without_their_names() -> None:
    ear = Ear(secret=SECRET)
    ear.engine.now = engine_load(warm={"acme": 7, "b": 2})
    await ear.start()
    load = ear.last("load", ReplicaLoad)
    assert isinstance(load, ReplicaLoad)
    assert load.warm == tuple(
        WarmBlocks(tenant_tag(SECRET, name), blocks) for name, blocks in (("acme", 7), ("b", 2))
    )
    assert b"acme" not in msgspec.msgpack.encode(load)


async def test_an_adapter_in_memory_is_told_at_once() -> None:
    ear = Ear()
    known = AdapterNote("x", "digest", False, 30.0), AdapterNote("y", "digest", False, 50.0)
    ear.publisher._hello = msgspec.structs.replace(hello(WIDE), adapters=known)
    await ear.start()
    assert await ear.beat(0.2) == []
    state = AdapterState(resident=("x",), load_ms={"x": 7.0})
    ear.engine.now = engine_load(adapters=state)
    assert await ear.beat(0.2) == ["hello"]
    said = ear.last("hello", ReplicaHello)
    assert isinstance(said, ReplicaHello)
    assert said.adapters == (AdapterNote("x", "digest", True, 7.0), known[1])
    assert await ear.beat(0.2) == []
    await ear.publisher.close()


async def test_a_failing_adapter_is_told_at_once_and_taken_back_in_time() -> None:
    ear = Ear()
    known = AdapterNote("x", "digest", False, 30.0)
    ear.publisher._hello = msgspec.structs.replace(hello(WIDE), adapters=(known,))
    await ear.start()
    assert await ear.beat(0.2) == []
    state = AdapterState(failures=1, avoided_until_s={"x": ear.clock.now_s + 1.0})
    ear.engine.now = engine_load(adapters=state)
    assert await ear.beat(0.2) == ["hello"]
    said = ear.last("hello", ReplicaHello)
    assert isinstance(said, ReplicaHello)
    assert [note.failing for note in said.adapters] == [True]
    assert "hello" in await ear.beat(1.0)
    said = ear.last("hello", ReplicaHello)
    assert isinstance(said, ReplicaHello)
    assert said.adapters == (known,)
    await ear.publisher.close()


async def test_draining_is_told_at_once(ear: Ear) -> None:
    ear.publisher.set_draining(True)
    assert await ear.beat(0.0) == ["load"]
    load = ear.last("load", ReplicaLoad)
    assert isinstance(load, ReplicaLoad)
    assert load.draining


async def test_the_end_of_work_is_told_at_once(ear: Ear) -> None:
    ear.engine.now = engine_load(running=1)
    await ear.beat(2.0)
    ear.engine.now = engine_load(running=0)
    assert await ear.beat(0.01) == ["load"]
    assert await ear.beat(0.01) == []
    load = ear.last("load", ReplicaLoad)
    assert isinstance(load, ReplicaLoad)
    assert load.running == 0


async def test_a_flood_of_roll_calls_is_not_a_flood_of_hellos(ear: Ear) -> None:
    said: list[str] = []
    for _ in range(1_000):
        await ear.bus.publish(roll_call_subject(CLUSTER), b"")
        said += await ear.beat(0.001)
    assert 5 <= said.count("hello") <= 11


async def test_a_reconnect_is_followed_by_a_hello(ear: Ear) -> None:
    await ear.beat(0.5)
    ear.bus.report_gap("reconnect")
    assert sorted(await ear.beat(0.0)) == ["hello", "load"]


async def test_a_dead_engine_is_not_spoken_for(ear: Ear) -> None:
    ear.engine.now = engine_load(alive=False)
    assert await ear.beat(10.0) == []
    ear.engine.now = engine_load()
    assert sorted(await ear.beat(0.0)) == ["hello", "load"]


async def test_the_last_word_is_bye(ear: Ear) -> None:
    await ear.publisher.close("drained")
    await ear.publisher.close("again")
    await settle()
    assert [kind for kind, _ in ear.heard].count("bye") == 1
    with pytest.raises(TimeoutError):
        await ear.chunk(SnapshotRequest())


async def test_a_snapshot_stays_frozen_while_deltas_go_on() -> None:
    ear = Ear(MANY_CHUNKS)
    await ear.start()
    first = await ear.chunk(SnapshotRequest())
    assert first.count == 2
    ear.engine.facts = stored(1)
    await ear.beat(0.1)
    second = await ear.chunk(SnapshotRequest(1, first.generation, first.seq))
    assert (second.index, second.seq, second.checksum) == (1, first.seq, first.checksum)
    for number in range(2, 12):
        ear.engine.facts = stored(number)
        await ear.beat(0.1)
        await ear.chunk(SnapshotRequest())
    assert len(ear.publisher._frozen) == 4
    late = await ear.chunk(SnapshotRequest(1, first.generation, first.seq))
    assert (late.index, late.seq) == (0, ear.publisher.residency.seq)
    await ear.publisher.close()


async def test_a_failing_tick_is_counted_and_the_next_one_works() -> None:
    ear = Ear()
    ear.publisher._config = config(digest_tick_ms=1.0, heartbeat_ms=1.0)
    good = ear.engine.load

    def fails() -> object:
        raise RuntimeError("engine")

    await ear.bus.subscribe(replica_subject(CLUSTER, "*", "*"), ear._hear)
    await ear.publisher.start()
    ear.engine.load = fails  # type: ignore[assignment]
    await until(lambda: ear.publisher.failures)
    ear.engine.load = good  # type: ignore[method-assign]
    ear.engine.facts = stored(1)
    await until(lambda: any(kind == "digest" for kind, _ in ear.heard))
    await ear.publisher.close()


def test_E6_a_contradicting_journal_is_counted_and_the_set_stays_right() -> None:
    residency = Residency(WIDE)
    residency.apply(stored(1, 1) + removed(2))
    assert residency.journal_faults == 2
    residency.apply(removed(1))
    assert len(residency) == 0
    assert not residency.freeze().bits.any()


def test_clearing_in_mid_life_clears_every_bit() -> None:
    residency = Residency(WIDE)
    residency.apply(stored(*range(100)))
    (numbered,) = residency.apply([*stored(200), CacheFact(CacheOp.CLEARED, b""), *stored(3)])
    became_set, became_clear = numbered[1].positions(WIDE.bits)
    assert became_set.size == 0
    assert became_clear.size > 500
    alone = Residency(WIDE)
    alone.apply(stored(3))
    assert (residency.freeze().bits == alone.freeze().bits).all()


def test_the_bound_can_be_out_of_reach_without_a_storm_of_generations() -> None:
    residency = Residency(DigestShape(bits=MAX_DIGEST_BITS, k=1), bound=0.0)
    for number in range(3):
        assert len(residency.apply(stored(number))) == 1
    assert residency.generation == 1


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(WireError):
        Residency(DigestShape(bits=1000, k=8))


class ListTiers:
    """Tiers that confirm what the test says."""

    def __init__(self) -> None:
        self.facts: list[list[CacheFact]] = [[], []]
        self.peers: tuple[str, ...] = ("",)

    def drain_facts(self) -> list[list[CacheFact]]:
        facts, self.facts = self.facts, [[], []]
        return facts

    def peer_names(self) -> tuple[str, ...]:
        return self.peers

    def fetch_fits(self) -> tuple[FetchFit, ...]:
        return FetchFit(1.0, 2.0), FetchFit(3.0, 4.0)


async def test_tiers_below_the_device_are_columns_of_the_same_digest() -> None:
    shape = DigestShape(bits=1024, k=4, columns=3)
    bus, engine, tiers, listener = MemoryBus(), ListEngine(), ListTiers(), MirrorListener()
    publisher = Publisher(
        bus, CLUSTER, "r0", hello(shape), engine, config(digest_tick_ms=1.0), 7, tiers=tiers
    )
    feed = Feed(bus, CLUSTER, listener)
    await publisher.start()
    await feed.start()
    await until(lambda: "r0" in feed.states() and feed.states()["r0"].digest_known)
    engine.facts += stored(1)
    tiers.facts = [stored(1, 2), stored(3)]
    await publisher.tick()
    tiers.facts = [removed(2), []]
    await publisher.tick()
    await settle()
    wanted = [
        positions(halves_of([key(number)]), shape.column).ravel() + np.uint32(place * shape.bits)
        for place, number in enumerate((1, 1, 3))
    ]
    bits = listener.bits("r0")
    assert bits is not None
    assert np.flatnonzero(bits).tolist() == sorted(set(np.concatenate(wanted).tolist()))
    assert not listener.broken
    assert publisher.residency.freeze().bits.size == 3 * 1024 // 8
    await until(lambda: listener.present["r0"].load is not None)
    load = listener.present["r0"].load
    assert load is not None
    assert load.fetch == tiers.fetch_fits()
    assert listener.present["r0"].hello.peers == ("",)
    tiers.peers = ("there",)
    await publisher.tick()
    await until(lambda: listener.present["r0"].hello.peers == ("there",))
    await feed.close()
    await publisher.close()


async def test_a_hello_asked_for_too_early_waits_for_no_beat() -> None:
    bus = MemoryBus()
    heard: list[object] = []
    slow = config(digest_tick_ms=6e5, heartbeat_ms=6e5, hello_ms=6e5)
    publisher = Publisher(bus, CLUSTER, "r0", hello(WIDE), ListEngine(), slow, 7)
    await bus.subscribe(replica_subject(CLUSTER, "*", "hello"), lambda *said: heard.append(said))
    await publisher.start()
    try:
        await bus.publish(roll_call_subject(CLUSTER), b"")
        await until(lambda: len(heard) == 2)
    finally:
        await publisher.close()
