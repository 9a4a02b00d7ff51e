"""The store that routers share: the same over JetStream and in memory."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from events.bus import Bus
from events.kv import bucket_of
from events.memory import MemoryBus, MemoryHub
from events.store import Store, StoreError
from tests.events.conftest import Town, open_town
from tests.events.helpers import CLUSTER
from tests.waiting import until

BUCKET = bucket_of(CLUSTER)


@pytest.fixture(params=["nats", "memory"])
async def new_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable]:
    """A function that connects one more router."""
    hub = MemoryHub()

    async def memory() -> Bus:
        return MemoryBus(hub)

    if request.param == "memory":
        yield memory
    else:
        async with open_town(tmp_path) as town:
            yield town.router


async def test_what_one_writes_all_read_and_hear_of(new_bus: Callable) -> None:
    one, other = await new_bus(), await new_bus()
    writer, reader = one.store(BUCKET), other.store(BUCKET)
    assert await writer.load() == await reader.load() == []
    assert await reader.last_revision() == 0
    heard: list[str] = []
    watching = await reader.watch(heard.append)
    first = await writer.put("tenant.a", b"1")
    second = await writer.put("tenant.b", b"2")
    third = await writer.put("tenant.a", b"3")
    assert first < second < third == await reader.last_revision()
    await until(lambda: heard == ["tenant.a", "tenant.b", "tenant.a"])
    assert (await reader.get("tenant.a")) == ("tenant.a", b"3", third)
    assert await reader.get("tenant.c") is None
    loaded = {entry.key: entry for entry in await reader.load()}
    assert {key: entry.value for key, entry in loaded.items()} == {
        "tenant.a": b"3",
        "tenant.b": b"2",
    }
    assert loaded["tenant.b"].revision == second
    await watching.close()


async def refused(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.load()
    with pytest.raises(StoreError):
        await store.put("tenant.a", b"1")
    with pytest.raises(StoreError):
        await store.last_revision()


async def test_E10_it_outlives_its_server_killed_hard(town: Town) -> None:
    bus = await town.router()
    store = bus.store(BUCKET)
    await store.load()
    revision = await store.put("tenant.a", b"kept")
    assert town.server.pid
    os.kill(town.server.pid, signal.SIGKILL)
    await until(lambda: not bus.connected and not town.server.running)
    await refused(store)
    heard: list[str] = []
    await store.watch(heard.append)
    await town.server.start()
    await until(lambda: bus.connected)
    assert await store.load() == [("tenant.a", b"kept", revision)]
    await store.put("tenant.a", b"more")
    await until(lambda: heard == ["tenant.a"])


async def test_without_a_store_everything_says_so() -> None:
    hub = MemoryHub()
    hub.has_store = False
    await refused(MemoryBus(hub).store(BUCKET))


async def test_only_routers_may_use_it(town: Town) -> None:
    await (await town.router()).store(BUCKET).load()
    for bus in (await town.replica("r0"), await town.viewer()):
        heard: list[str] = []
        await bus.store(BUCKET).watch(heard.append)
        before = bus.stats.refused
        await bus.publish(f"$KV.{BUCKET}.tenant.a", b"forged")
        await bus.publish(f"$JS.API.STREAM.DELETE.KV_{BUCKET}", b"")
        await until(lambda bus=bus, before=before: bus.stats.refused >= before + 2)
        assert heard == []
    assert await (await town.router()).store(BUCKET).load() == []
