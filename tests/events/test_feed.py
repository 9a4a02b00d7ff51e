"""The feed and the publisher over a bus with faults: each case by name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from events.digest import DigestDelta
from events.envelope import seal
from events.feed import Feed
from events.load import ReplicaBye
from events.subjects import replica_subject, snapshot_subject
from tests.events.helpers import (
    CLUSTER,
    MirrorListener,
    engine_load,
    hello,
    removed,
    settle,
    stored,
)
from tests.events.test_digest import bits_of
from tests.events.world import WIDE, World

DIGEST = replica_subject(CLUSTER, "r0", "digest")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.feed.start()
    await world.serve(world.publisher)
    await world.beat()
    yield world
    assert world.listener.broken == []
    await world.feed.close()
    await world.publisher.close()


async def test_deltas_arrive_and_evictions_are_unlearned(world: World) -> None:
    world.engine.facts = stored(1, 2, 3)
    await world.beat()
    assert (world.listener.bits("r0") == bits_of([1, 2, 3], WIDE)).all()
    world.engine.facts = removed(2)
    await world.beat()
    assert (world.listener.bits("r0") == bits_of([1, 3], WIDE)).all()
    assert world.listener.resets() == 1


async def test_E1_one_gap_is_one_repair(world: World) -> None:
    world.hub.fault = lambda s, p: (
        () if s == DIGEST and world.publisher.residency.seq == 57 else (0,)
    )
    for number in range(1, 101):
        world.engine.facts = stored(number)
        await world.beat()
    assert world.listener.resets() == 2
    assert [reason for *_, reason in world.listener.unknown] == ["gap"]
    world.hub.fault = None
    for number in range(101, 201):
        world.engine.facts = stored(number)
        await world.beat()
    assert world.listener.resets() == 2
    assert world.feed.states()["r0"].seq == world.publisher.residency.seq
    assert world.in_sync()


async def test_E1_duplicates_change_nothing(world: World) -> None:
    world.hub.fault = lambda _s, _p: (0, 0)
    for number in range(20):
        world.engine.facts = stored(number)
        await world.beat()
    assert world.listener.resets() == 1
    assert world.listener.unknown == []
    assert world.in_sync()


async def test_a_lost_last_delta_is_noticed_by_the_heartbeat(world: World) -> None:
    world.hub.fault = lambda subject, _p: () if subject == DIGEST else (0,)
    world.engine.facts = stored(1)
    await world.beat()
    world.hub.fault = None
    assert world.listener.bits("r0") is not None
    for _ in range(8):
        await world.beat(0.25)
    assert [reason for *_, reason in world.listener.unknown] == ["lost_last_delta"]
    assert world.in_sync()


async def test_E5_a_new_reader_learns_old_and_new_prefixes(world: World) -> None:
    world.engine.facts = stored(*range(50))
    await world.beat()
    await world.feed.close()
    world.listener.present.clear()
    world.feed = world.new_feed()
    await world.feed.start()
    await settle()
    world.engine.facts = stored(*range(50, 60))
    await world.beat(0.2)
    assert (world.listener.bits("r0") == bits_of(list(range(60)), WIDE)).all()


async def test_E8_a_restart_fences_everything_older(world: World) -> None:
    old_boot, late = world.publisher.boot, []
    world.engine.facts = stored(*range(300))

    def keep(subject: str, payload: bytes) -> tuple[int, ...]:
        late.append((subject, payload))
        return (0,)

    world.hub.fault = keep
    for number in range(300, 320):
        world.engine.facts += stored(number)
        await world.beat(0.3)
    world.hub.fault = None
    await world.restart()
    assert world.listener.gone == [("r0", old_boot, "restarted")]
    assert (world.listener.bits("r0") == bits_of([], WIDE)).all()
    calls = len(world.listener.calls)
    for subject, payload in late:
        world.hub.publish(subject, payload)
    await settle()
    assert len(world.listener.calls) == calls
    assert (world.listener.bits("r0") == bits_of([], WIDE)).all()
    assert world.feed.stats.old >= 20


async def test_E8_a_former_holder_that_wakes_up_falls_silent(world: World) -> None:
    zombie = world.publisher
    world.publisher = world.new_publisher()
    await world.serve(world.publisher)
    await settle()
    assert zombie.superseded
    published = zombie._bus.published  # type: ignore[attr-defined]
    await zombie.tick()
    await zombie._run()
    await zombie.close()
    assert zombie._bus.published == published  # type: ignore[attr-defined]
    await world.calm()
    assert world.in_sync()


async def test_a_bye_ends_that_life_for_good(world: World) -> None:
    await world.publisher.close("drained")
    await settle()
    assert world.listener.gone == [("r0", world.boot, "drained")]
    world.hub.publish(
        replica_subject(CLUSTER, "r0", "hello"), seal("r0", world.boot, 1, 0, hello())
    )
    await settle()
    assert world.listener.present == {}


async def test_silence_costs_the_digest_then_the_membership(world: World) -> None:
    world.engine.now = engine_load(alive=False)
    await world.beat(2.6)
    assert [reason for *_, reason in world.listener.unknown] == ["silent"]
    assert "r0" in world.listener.present
    await world.beat(4.0)
    assert world.listener.gone == [("r0", world.boot, "silent")]
    world.engine.now = engine_load()
    world.engine.facts = stored(1)
    for _ in range(5):
        await world.beat(0.5)
    assert world.in_sync()


async def test_R13_late_heartbeats_cost_nothing(world: World) -> None:
    world.engine.facts = stored(1, 2)
    await world.beat()
    for _ in range(5):
        world.clock.now_s += 2.0
        await world.feed.sweep()
        await settle()
        await world.beat()
    assert world.listener.unknown == []
    assert world.listener.gone == []
    assert world.in_sync()


async def test_E10_our_own_deafness_is_nobodys_death(world: World) -> None:
    world.bus.disconnect()
    for _ in range(60):
        await world.beat(0.5)
    assert [reason for *_, reason in world.listener.unknown] == ["silent"]
    assert world.listener.gone == []
    world.bus.reconnect()
    await world.beat()
    assert world.listener.gone == []
    for _ in range(6):
        await world.beat(0.25)
    assert world.in_sync()


async def test_E9_a_reconnect_makes_everything_unknown_until_fetched(world: World) -> None:
    world.bus.disconnect()
    world.engine.facts = stored(1, 2)
    await world.publisher.tick()
    world.bus.reconnect()
    assert [reason for *_, reason in world.listener.unknown] == ["reconnect"]
    for _ in range(3):
        await world.beat()
    assert world.in_sync()


async def test_a_replica_that_never_answers_is_not_stormed(world: World) -> None:
    asked = 0

    def fault(subject: str, _payload: bytes) -> tuple[int, ...]:
        nonlocal asked
        asked += subject == snapshot_subject(CLUSTER, "r0")
        return () if subject in (DIGEST, snapshot_subject(CLUSTER, "r0")) else (0,)

    world.hub.fault = fault
    world.bus.report_gap("slow_consumer")
    for number in range(600):
        world.engine.facts = stored(number)
        await world.beat(0.05)
        world.bus.report_gap("slow_consumer")
    assert 6 < asked < 20
    world.hub.fault = None
    await world.calm()
    assert world.in_sync()


async def test_a_reader_that_comes_before_the_hello_asks_for_it(world: World) -> None:
    listener = MirrorListener()
    feed = Feed(world.bus, CLUSTER, listener, world.clock)
    world.hub.fault = lambda subject, _p: () if subject.endswith("rollcall") else (0,)
    await feed.start()
    await world.beat()
    assert listener.present == {}
    world.hub.fault = None
    for _ in range(10):
        await world.beat(0.25)
        await feed.sweep()
    await settle()
    assert listener.bits("r0") is not None
    await feed.close()


async def test_growth_is_a_new_generation_with_a_new_hello(world: World) -> None:
    world.engine.facts = stored(*range(2_000))
    await world.beat()
    await world.calm()
    assert world.publisher.residency.generation == 2
    bits = world.listener.bits("r0")
    assert bits is not None
    assert bits.size > WIDE.bits
    assert world.in_sync()
    world.engine.facts = removed(*range(1_900))
    await world.beat()
    assert world.in_sync()
    assert (bits == bits_of(list(range(1_900, 2_000)), world.publisher.residency.shape)).all()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80\x04\x95pickle",
        seal("r1", 10**15, 1, 1, ReplicaBye(reason="forged")),
        seal("r0", 10**15, 1, 1, DigestDelta(b"", b""))[:-3],
        bytes(2_000_000),
    ],
)
async def test_S1_what_is_malformed_is_counted_and_does_nothing(
    world: World, payload: bytes
) -> None:
    calls = list(world.listener.calls)
    for kind in ("hello", "load", "digest", "bye", "surprise"):
        world.hub.publish(replica_subject(CLUSTER, "r0", kind), payload)
    await settle()
    assert world.feed.stats.malformed == 5
    assert world.listener.calls == calls
    assert set(world.listener.present) == {"r0"}
    world.engine.facts = stored(1)
    await world.beat()
    assert world.in_sync()


async def test_positions_outside_the_digest_are_a_gap(world: World) -> None:
    delta = DigestDelta(WIDE.bits.to_bytes(4, "little"), b"")
    world.hub.publish(DIGEST, seal("r0", world.boot, 1, 1, delta))
    await settle()
    assert [reason for *_, reason in world.listener.unknown] == ["malformed"]
    await world.calm()
    assert world.in_sync()


async def test_R9_the_table_of_replicas_is_bounded(world: World) -> None:
    listener = MirrorListener()
    feed = Feed(world.bus, CLUSTER, listener, world.clock, max_replicas=10)
    await feed.start()
    for number in range(1_000):
        name = f"x{number}"
        bye = seal(name, 1, 1, 0, ReplicaBye(reason="none"))
        world.hub.publish(replica_subject(CLUSTER, name, "bye"), bye)
    await settle()
    assert len(feed.states()) == 10
    for number in range(20):
        name = f"y{number}"
        world.hub.publish(replica_subject(CLUSTER, name, "hello"), seal(name, 1, 1, 0, hello()))
    await settle()
    assert len(listener.present) == 10
    assert feed.stats.refused >= 10
    world.clock.now_s += 100
    await feed.sweep()
    world.clock.now_s += 100
    await feed.sweep()
    assert feed.states() == {}
    await feed.close()
