"""Gaps, replays and restarts over real ZMQ sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tests.fakes.kv_publisher import KvPublisher, removed, stored
from tests.tools.bridge.test_cache import SALT, Told
from tests.waiting import PATIENCE_S, until
from tools.bridge.follow import Follower
from tools.bridge.sequence import Sequence, Verdict
from tools.bridge.source import Endpoints, EngineGoneError, EventSource


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def block(number: int) -> dict:
    return stored([number], [number, number])


class Following:
    """A follower on its way."""

    def __init__(self, engine: KvPublisher, replay: bool = True, awaited: bool = False) -> None:
        self.told = Told(SALT)
        self.engine, self.awaited = engine, awaited
        endpoints = Endpoints(engine.events, engine.replay if replay else "", awaited)
        self.source = EventSource(endpoints)
        self.follower = Follower(self.source, self.told.cache)
        self.task: asyncio.Task[None]

    async def __aenter__(self) -> Following:
        await self.source.__aenter__()
        await self.source.connected()
        if not self.awaited:
            await self.engine.subscribed()
        await self.follower.catch_up()
        self.task = asyncio.create_task(self.follower.follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.source.__aexit__(None, None, None)

    async def holds(self, count: int) -> None:
        await until(lambda: len(self.told.cache) == count)


@pytest.fixture
async def engine() -> AsyncIterator[KvPublisher]:
    async with KvPublisher() as publisher:
        yield publisher


async def test_what_was_said_before_is_replayed(engine: KvPublisher) -> None:
    for number in range(20):
        await engine.send(block(number))
    async with Following(engine) as following:
        await following.holds(20)
        await engine.send(removed(0), block(20))
        await following.holds(20)
        assert not following.follower.counts


async def test_an_engine_that_connects_is_listened_for_life_after_life() -> None:
    async with KvPublisher(dials=free_port()) as engine:
        for _ in range(2):
            async with Following(engine, awaited=True) as following:
                # What is said before it knows that somebody hears it is asked for again.
                while not len(following.told.cache):
                    await engine.send(block(engine.number))
                    await asyncio.sleep(0.02)
                await following.holds(engine.number)
                await engine.restart()
                with pytest.raises(EngineGoneError):
                    async with asyncio.timeout(PATIENCE_S):
                        await following.task


async def test_where_somebody_listens_already_nobody_else_does(engine: KvPublisher) -> None:
    async with Following(engine, awaited=True) as following:
        await engine.subscribed()
        await engine.send(block(0))
        await following.holds(1)


async def test_E1_one_gap_is_one_repair(engine: KvPublisher) -> None:
    async with Following(engine) as following:
        for number in range(200):
            await engine.send(block(number), lose=number in (57, 58))
        await following.holds(200)
        assert following.follower.counts == {"gaps": 1}
        assert engine.replays == 2


async def test_a_gap_that_cannot_be_closed_forgets_all(engine: KvPublisher) -> None:
    async with Following(engine, replay=False) as following:
        for number in range(10):
            await engine.send(block(number), lose=number == 5)
        await following.holds(4)
        assert following.follower.counts == {"gaps": 1, "lost": 1}


async def test_a_replay_that_begins_too_late_forgets_what_was_before() -> None:
    async with KvPublisher(keep=3) as engine, Following(engine) as following:
        for number in range(10):
            await engine.send(block(number), lose=2 <= number < 9)
        await following.holds(3)
        assert following.follower.counts == {"gaps": 1, "lost": 1}


async def test_E8_a_restart_ends_this_life(engine: KvPublisher) -> None:
    async with Following(engine) as following:
        await engine.send(block(1))
        await following.holds(1)
        await engine.restart()
        with pytest.raises(EngineGoneError):
            await asyncio.wait_for(following.task, PATIENCE_S)


async def test_a_message_that_cannot_be_read_costs_what_is_known(engine: KvPublisher) -> None:
    async with Following(engine) as following:
        await engine.send(block(1))
        for garbage in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5_000):
            await engine.send_raw(garbage)
        await engine.send(block(2))
        await until(lambda: following.follower.counts["malformed"] == 4)
        await following.holds(1)


def test_numbers_of_the_live_stream_never_go_back() -> None:
    sequence = Sequence()
    assert sequence.live(0) is Verdict.NEXT
    sequence.take(0)
    assert sequence.live(2) is Verdict.GAP
    assert sequence.replayed(1) is Verdict.NEXT
    sequence.take(1)
    assert sequence.replayed(2) is Verdict.NEXT
    sequence.take(2)
    sequence.take(3)
    assert sequence.live(3) is Verdict.OLD
    assert sequence.live(0) is Verdict.RESTART
