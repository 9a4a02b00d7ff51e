"""Publisher and feed over a real nats-server that stops, dies, hangs, or refuses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from events.feed import Feed
from events.load import DigestShape
from events.nats import MAX_PENDING_IN_MESSAGES, MAX_PENDING_OUT_BYTES, NatsBus
from events.subjects import replica_subject
from replica.publish import Publisher
from tests.events.conftest import Town
from tests.events.helpers import CLUSTER, ListEngine, MirrorListener, config, hello, stored
from tests.events.world import WIDE
from tests.processes import go_on, stand_still
from tests.waiting import PATIENCE_S, until

LOAD = replica_subject(CLUSTER, "r0", "load")
QUICK = {"digest_tick_ms": 5.0, "heartbeat_ms": 25.0, "hello_ms": 200.0}


@dataclass
class Ends:
    """Both ends over the wire, on real time."""

    replica: NatsBus
    router: NatsBus
    engine: ListEngine
    publisher: Publisher
    listener: MirrorListener
    feed: Feed

    def in_sync(self) -> bool:
        bits = self.listener.bits("r0")
        told = self.publisher.residency.freeze().bits
        return bits is not None and bool(
            (bits == np.unpackbits(told, bitorder="little").astype(bool)).all()
        )

    async def store_slowly(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.engine.facts = [*self.engine.facts, *stored(number)]
            await asyncio.sleep(0.002)

    async def all_told(self, count: int) -> None:
        await until(
            lambda: len(self.publisher.residency) == count and self.in_sync(), what="the sync"
        )


async def make_ends(town: Town, shape: DigestShape = WIDE) -> Ends:
    replica, router = await town.replica(), await town.router()
    engine, listener = ListEngine(), MirrorListener()
    publisher = Publisher(replica, CLUSTER, "r0", hello(shape), engine, config(**QUICK), boot=1)
    return Ends(replica, router, engine, publisher, listener, Feed(router, CLUSTER, listener))


@pytest.fixture
async def ends(town: Town) -> AsyncIterator[Ends]:
    ends = await make_ends(town)
    await ends.feed.start()
    await ends.publisher.start()
    yield ends
    await ends.publisher.close()
    await ends.feed.close()
    assert ends.listener.broken == []
    assert ends.publisher.failures == 0


async def test_both_ends_over_the_wire(ends: Ends) -> None:
    await ends.store_slowly(1, 50)
    await ends.all_told(50)
    assert ends.listener.resets() == 1
    assert ends.router.stats.refused == ends.replica.stats.refused == 0
    await ends.publisher.close("done")
    await until(lambda: ends.listener.gone == [("r0", 1, "done")])


async def test_a_digest_of_many_chunks_while_deltas_go_on(town: Town) -> None:
    ends = await make_ends(town, DigestShape(bits=1 << 23, k=8))
    await ends.publisher.start()
    await ends.store_slowly(1, 20)
    await ends.feed.start()
    await ends.store_slowly(21, 200)
    await ends.all_told(200)
    assert ends.listener.broken == []
    await ends.publisher.close()
    await ends.feed.close()


async def test_E9_messages_lost_around_a_disconnect_are_noticed(ends: Ends, town: Town) -> None:
    await ends.store_slowly(1, 30)
    await ends.all_told(30)
    await town.server.stop()
    await ends.store_slowly(31, 60)
    await until(lambda: len(ends.publisher.residency) == 60)
    assert ends.replica.stats.dropped > 0
    await town.server.start()
    await ends.store_slowly(61, 100)
    await ends.all_told(100)
    assert ends.listener.unknown
    assert ends.listener.gone == []


async def test_E10_after_a_hard_kill_the_consumer_is_really_back(ends: Ends, town: Town) -> None:
    await ends.store_slowly(1, 10)
    await ends.all_told(10)
    for round_number in (1, 2):
        assert town.server.pid
        os.kill(town.server.pid, signal.SIGKILL)
        await until(lambda: not town.server.running and not ends.router.connected)
        await town.server.start()
        await ends.store_slowly(10 * round_number + 1, 10 * round_number + 10)
        await ends.all_told(10 * round_number + 10)
    assert ends.router.stats.reconnects == 2


async def test_E10_a_connection_that_the_client_gave_up_is_made_anew(ends: Ends) -> None:
    await ends.store_slowly(1, 10)
    await ends.all_told(10)
    for bus in (ends.router, ends.replica):
        await bus._client._send_command(b"NONSENSE\r\n")
        await bus._client._flush_pending()
    await until(lambda: ends.router.stats.reconnects and ends.replica.stats.reconnects)
    await ends.store_slowly(11, 20)
    await ends.all_told(20)


async def test_E12_with_nobody_listening_nothing_piles_up(town: Town) -> None:
    ends = await make_ends(town)
    await ends.publisher.start()
    for number in range(0, 3_000, 10):
        ends.engine.facts = stored(*range(number, number + 10))
        await ends.publisher.tick()
    assert ends.replica._client.pending_data_size <= MAX_PENDING_OUT_BYTES
    assert len(ends.publisher._frozen) <= 4
    await ends.feed.start()
    await until(ends.in_sync)
    await ends.feed.close()
    await ends.publisher.close()


async def test_E12_a_hanging_server_never_blocks_the_publisher(ends: Ends, town: Town) -> None:
    assert town.server.pid
    stand_still(town.server.pid)
    try:
        payload = bytes(100_000)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(500):
                await ends.replica.publish(LOAD, payload)
                await asyncio.sleep(0)
        assert ends.replica.stats.dropped > 100
        assert ends.replica._client.pending_data_size <= MAX_PENDING_OUT_BYTES
    finally:
        go_on(town.server.pid)
    await ends.store_slowly(1, 10)
    await ends.all_told(10)


async def test_a_slow_consumer_is_a_gap(town: Town) -> None:
    replica, router = await town.replica(), await town.router()
    gaps: list[str] = []
    router.on_gap(gaps.append)
    await router.subscribe(LOAD, lambda _subject, _payload: None)
    (subscription,) = router._subscriptions
    assert subscription._live
    subscription._live._wait_for_msgs_task.cancel()
    for _ in range(MAX_PENDING_IN_MESSAGES // 256 + 2):
        for _ in range(256):
            await replica.publish(LOAD, b"x")
        await asyncio.sleep(0)
    await until(lambda: gaps)
    assert set(gaps) == {"slow_consumer"}
    assert len(gaps) < router.stats.slow_drops
