"""What every bus promises: the same tests for core NATS and for its twin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from events.bus import Bus
from events.memory import MemoryBus, MemoryHub
from events.subjects import replica_subject, roll_call_subject, snapshot_subject
from tests.events.conftest import open_town
from tests.events.helpers import CLUSTER
from tests.waiting import until

LOAD = replica_subject(CLUSTER, "r0", "load")
ANY = replica_subject(CLUSTER, "*", "*")
SNAPSHOT = snapshot_subject(CLUSTER, "r0")


@dataclass
class Pair:
    """A replica's bus, a router's bus, and how to take the server away and bring it back."""

    replica: Bus
    router: Bus
    down: Callable[[], Awaitable[None]]
    up: Callable[[], Awaitable[None]]


def memory_pair() -> Pair:
    hub = MemoryHub()
    replica, router = MemoryBus(hub), MemoryBus(hub)

    async def down() -> None:
        replica.disconnect()
        router.disconnect()

    async def up() -> None:
        replica.reconnect()
        router.reconnect()

    return Pair(replica, router, down, up)


@pytest.fixture(params=["memory", "nats"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    if request.param == "memory":
        yield memory_pair()
        return
    async with open_town(tmp_path) as town:
        yield Pair(await town.replica(), await town.router(), town.server.stop, town.server.start)


async def listen(bus: Bus, subject: str) -> list[tuple[str, bytes]]:
    got: list[tuple[str, bytes]] = []
    await bus.subscribe(subject, lambda subject, payload: got.append((subject, payload)))
    return got


async def test_messages_arrive_in_order(pair: Pair) -> None:
    got = await listen(pair.router, ANY)
    for number in range(500):
        await pair.replica.publish(LOAD, str(number).encode())
    await until(lambda: len(got) == 500)
    assert got == [(LOAD, str(number).encode()) for number in range(500)]


async def test_kinds_keep_their_common_order(pair: Pair) -> None:
    got = await listen(pair.router, ANY)
    sent = [replica_subject(CLUSTER, "r0", kind) for kind in ("hello", "digest", "load", "bye")] * 9
    for subject in sent:
        await pair.replica.publish(subject, b"x")
    await until(lambda: len(got) == len(sent))
    assert [subject for subject, _ in got] == sent


async def test_a_star_is_exactly_one_token(pair: Pair) -> None:
    narrow = await listen(pair.router, replica_subject(CLUSTER, "*", "hello"))
    wide = await listen(pair.router, ANY)
    await pair.replica.publish(LOAD, b"x")
    await pair.router.publish(roll_call_subject(CLUSTER), b"x")
    await pair.replica.publish(replica_subject(CLUSTER, "r0", "hello"), b"y")
    await until(lambda: len(wide) == 2)
    assert [payload for _, payload in narrow] == [b"y"]


async def test_a_closed_subscription_hears_nothing(pair: Pair) -> None:
    first: list[bytes] = []
    subscription = await pair.router.subscribe(ANY, lambda _, payload: first.append(payload))
    second = await listen(pair.router, ANY)
    await subscription.close()
    await subscription.close()
    await pair.replica.publish(LOAD, b"x")
    await until(lambda: second)
    assert first == []


async def test_a_failing_handler_harms_only_itself(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bytes] = []

    def fails(_subject: str, payload: bytes) -> None:
        calls.append(payload)
        raise RuntimeError("handler")

    await pair.router.subscribe(ANY, fails)
    got = await listen(pair.router, ANY)
    await pair.replica.publish(LOAD, b"secret-1")
    await pair.replica.publish(LOAD, b"secret-2")
    await until(lambda: len(got) == 2 and len(calls) == 2)
    assert "secret" not in caplog.text


async def test_requests_are_answered(pair: Pair) -> None:
    async def respond(payload: bytes) -> bytes:
        return b"re:" + payload

    await pair.replica.serve(SNAPSHOT, respond)
    asked = [pair.router.request(SNAPSHOT, str(n).encode(), 2.0) for n in range(20)]
    assert await asyncio.gather(*asked) == [f"re:{n}".encode() for n in range(20)]


async def test_no_answer_is_a_timeout(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError):
        await pair.router.request(SNAPSHOT, b"", 5.0)

    async def fails(payload: bytes) -> bytes:
        if payload == b"hang":
            await asyncio.Event().wait()
        raise RuntimeError("responder")

    await pair.replica.serve(SNAPSHOT, fails)
    for payload in (b"fail", b"hang"):
        with pytest.raises(TimeoutError):
            await pair.router.request(SNAPSHOT, payload, 0.2)


async def test_a_failing_gap_listener_harms_nobody(pair: Pair) -> None:
    gaps: list[str] = []

    def fails(_reason: str) -> None:
        raise RuntimeError("listener")

    pair.router.on_gap(fails)
    pair.router.on_gap(gaps.append)
    got = await listen(pair.router, ANY)
    await pair.down()
    await pair.up()
    await until(lambda: pair.replica.connected and pair.router.connected and gaps)
    await pair.replica.publish(LOAD, b"x")
    await until(lambda: got)


async def test_an_absent_server_drops_and_tells(pair: Pair) -> None:
    gaps: list[str] = []
    pair.router.on_gap(gaps.append)
    got = await listen(pair.router, ANY)
    assert pair.router.connected
    await pair.down()
    await until(lambda: not pair.replica.connected and not pair.router.connected)
    await pair.replica.publish(LOAD, b"lost")
    with pytest.raises(TimeoutError):
        await pair.router.request(SNAPSHOT, b"", 5.0)
    await pair.up()
    await until(lambda: pair.replica.connected and pair.router.connected and gaps)
    await pair.replica.publish(LOAD, b"heard")
    await until(lambda: got)
    assert got == [(LOAD, b"heard")]
    assert set(gaps) == {"reconnect"}


async def test_faults_of_the_memory_hub() -> None:
    pair = memory_pair()
    hub = pair.router.hub  # type: ignore[attr-defined]
    got = await listen(pair.router, ANY)
    plans = {b"0": (), b"1": (0, 0), b"2": (2,), b"3": (0,), b"4": (0,), b"5": (9,)}
    hub.fault = lambda _subject, payload: plans[payload]
    for payload in sorted(plans):
        await pair.replica.publish(LOAD, payload)
    await asyncio.sleep(0)
    assert [payload for _, payload in got] == [b"1", b"1", b"3", b"4", b"2"]
    hub.release()
    await asyncio.sleep(0)
    assert got[-1] == (LOAD, b"5")
