"""Settings that all routers share: they hold everywhere, survive restarts, and can't be read."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from configs.model.card import ModelCard
from configs.schema import TenantConfig
from events.errors import WireError
from events.memory import MemoryBus, MemoryHub
from router.cluster.registry import OFFLINE, UNREADABLE, Registry
from router.cluster.seal import Seal
from router.cluster.shared import decode_tenant, encode_tenant
from router.gateway import Gateway
from router.telemetry.alarms import Alarms
from tests.router.gateway.house import ADMIN_KEY, CHAT, COMPLETION
from tests.router.gateway.street import Street
from tests.waiting import PATIENCE_S, until

KEY = b"k" * 32
BUCKET = "wr_test"


class Notes:
    """A section that keeps what holds."""

    def __init__(self, file: dict[str, bytes] | None = None) -> None:
        self.file = file or {}
        self.held: dict[str, bytes | None] = dict(self.file)

    def apply(self, name: str, value: bytes | None) -> None:
        if value == b"bad":
            raise WireError("not that")
        self.held[name] = value

    def in_file(self, name: str) -> bytes | None:
        return self.file.get(name)


class Desk:
    """One router's registry over a hub in memory."""

    def __init__(self, hub: MemoryHub, key: bytes = KEY, file: dict[str, bytes] | None = None):
        self.bus = MemoryBus(hub)
        self.alarms = Alarms(time.monotonic)
        self.notes = Notes(file)
        self.registry = Registry(self.bus, BUCKET, Seal(key), self.alarms, "a")
        self.registry.add("note", self.notes)

    async def set(self, name: str, value: bytes | None) -> bool:
        """As a handler does: here first, then for all."""
        self.notes.held[name] = value
        return await self.registry.share("note", name, value)


@pytest.fixture
async def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def open_desk(hub: MemoryHub) -> AsyncIterator[Any]:
    desks: list[Desk] = []

    async def make(**settings: Any) -> Desk:
        desk = Desk(hub, **settings)
        desks.append(desk)
        await desk.registry.start()
        return desk

    yield make
    for desk in desks:
        await desk.registry.close()


async def test_a_change_holds_on_all_and_for_who_comes_later(open_desk: Any) -> None:
    one, other = await open_desk(), await open_desk()
    assert await one.set("n", b"1")
    await until(lambda: other.notes.held == {"n": b"1"})
    assert await other.set("n", b"2")
    await until(lambda: one.notes.held == {"n": b"2"})
    assert await one.set("n", None)
    late = await open_desk()
    assert late.notes.held == {"n": None}


async def test_offline_it_holds_here_says_so_and_is_told_later(
    hub: MemoryHub, open_desk: Any
) -> None:
    hub.has_store = False
    one, other = await open_desk(), await open_desk()
    assert one.alarms.active(OFFLINE, "a")
    assert not await one.set("n", b"1")
    hub.has_store = True
    await until(lambda: other.notes.held == {"n": b"1"})
    assert not one.alarms.active(OFFLINE, "a")
    assert one.registry.online


async def test_a_lost_store_is_filled_again(hub: MemoryHub, open_desk: Any) -> None:
    one = await open_desk()
    await one.set("n", b"1")
    hub.buckets.clear()
    one.bus.report_gap("reconnect")
    await until(lambda: bool(hub.buckets.get(BUCKET)))
    assert (await open_desk()).notes.held == {"n": b"1"}


async def test_the_file_counts_again_once_it_was_changed(open_desk: Any) -> None:
    one = await open_desk(file={"n": b"old"})
    await one.set("n", b"set")
    assert (await open_desk(file={"n": b"old"})).notes.held == {"n": b"set"}
    assert (await open_desk()).notes.held == {"n": b"set"}
    changed = await open_desk(file={"n": b"new"})
    assert changed.notes.held == {"n": b"new"}
    await one.set("n", b"later")
    await until(lambda: changed.notes.held == {"n": b"later"})


async def test_what_can_not_be_read_or_used_is_left_alone_and_named(
    hub: MemoryHub, open_desk: Any
) -> None:
    one = await open_desk()
    await one.set("n", b"1")
    (stored,) = hub.buckets[BUCKET].values()
    store = one.bus.store(BUCKET)
    await store.put("note.moved", stored.value)
    await store.put("other.kind", stored.value)
    await store.put(stored.key, stored.value[:-1] + b"x")
    late, stranger = await open_desk(), await open_desk(key=b"x" * 32)
    for desk in (one, late, stranger):
        await until(lambda desk=desk: desk.alarms.active(UNREADABLE, "a"))
    assert one.notes.held == {"n": b"1"}
    assert late.notes.held == stranger.notes.held == {}


async def test_a_value_is_sealed_and_bound_to_its_place() -> None:
    seal = Seal(KEY)
    place = seal.name("tenant", "acme")
    assert place.startswith("tenant.")
    assert "acme" not in place
    sealed = seal.close(place, b"a secret")
    assert b"secret" not in sealed
    assert seal.close(place, b"a secret") != sealed
    assert seal.open(place, sealed) == b"a secret"
    for key, data in ((place + "0", sealed), (place, sealed[:9]), (place, b""), (place, b"\2x")):
        with pytest.raises(WireError):
            seal.open(key, data)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_fails_in_the_end_all_hold_the_same(
    seed: int, hub: MemoryHub, open_desk: Any
) -> None:
    rng = random.Random(seed)
    desks = [await open_desk() for _ in range(3)]
    hub.fault = lambda subject, payload: () if rng.random() < 0.3 else (0,)
    for step in range(60):
        desk = rng.choice(desks)
        event = rng.random()
        if event < 0.6:
            await desk.set(rng.choice("xyz"), b"%d" % step)
        elif event < 0.7:
            desk.bus.disconnect()
        elif event < 0.9:
            desk.bus.reconnect()
        else:
            hub.has_store = not hub.has_store
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    hub.has_store, hub.fault = True, None
    for desk in desks:
        desk.bus.reconnect()
    await until(lambda: all(desk.notes.held == desks[0].notes.held for desk in desks))
    assert set(desks[0].notes.held) == set("xyz")


def test_a_tenant_of_a_later_version_is_taken_as_far_as_it_is_known() -> None:
    config = TenantConfig(name="acme", key_sha256=("ab" * 32,), scope="group:g", weight=2.0)
    assert decode_tenant(encode_tenant(config)) == config
    later = encode_tenant(config).replace(b"\xa6weight", b"\xa6height")
    assert decode_tenant(later).weight == 1.0


@pytest.fixture
async def street(tiny_card: ModelCard, tmp_path: Path) -> AsyncIterator[Street]:
    async with Street(tiny_card, tmp_path, replicas=1, allow_anonymous=False) as street:
        yield street


async def call(
    http: aiohttp.ClientSession, gateway: Gateway, method: str, path: str, body: Any = None
) -> dict[str, Any]:
    headers = {"x-warmroute-admin": ADMIN_KEY}
    async with http.request(method, gateway.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def chat(http: aiohttp.ClientSession, gateway: Gateway, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{gateway.url}/v1/chat/completions"
    async with http.post(url, json=CHAT, headers=headers) as response:
        await response.read()
        return response.status


async def until_chat(http: aiohttp.ClientSession, gateway: Gateway, key: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await chat(http, gateway, key) != status:  # noqa: ASYNC110 (over HTTP)
            await asyncio.sleep(0.01)


def stored_bytes(folder: Path) -> bytes:
    """What nats-server has on disk."""
    return b"".join(path.read_bytes() for path in folder.rglob("*.blk"))


async def test_what_is_put_on_one_router_holds_on_all_and_after_a_restart(
    street: Street, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    one, other = street.gateways
    body = {"key": "sk-acme-0123456789", "weight": 3.0}
    assert (await call(http, one, "PUT", "/router/tenants/acme", body))["shared"]
    await until_chat(http, other, body["key"], 200)
    assert (await call(http, other, "PUT", "/router/policy", {"policy": "round_robin"}))["shared"]
    prefix = {"prompt": COMPLETION["prompt"] * 40}
    added = await call(http, one, "POST", "/router/public-prefixes", prefix)
    assert added["shared"]
    await until(lambda: one.services.brain.policy == "round_robin")
    await until(lambda: [p.name for p in other.services.prefixes] == [added["name"]])
    await call(http, one, "PUT", "/router/shadow", {"policy": "random"})
    await until(lambda: other.services.brain.shadow.policy == "random")

    await other.close()
    again = await street.gateway("router-1", allow_anonymous=False)
    assert again.services.brain.policy == "round_robin"
    assert again.services.brain.shadow.policy == "random"
    assert [p.name for p in again.services.prefixes] == [added["name"]]
    acme = again.services.tenants.named("acme")
    assert acme.policy.weight == 3.0
    assert acme.salt == one.services.tenants.named("acme").salt
    await until_chat(http, again, body["key"], 200)

    await call(http, again, "DELETE", "/router/tenants/acme")
    await until_chat(http, one, body["key"], 401)
    kept = stored_bytes(tmp_path)
    assert kept
    (tokens,) = (p.tokens for p in one.services.prefixes)
    for secret in (b"acme", acme.salt, tokens[:64], b"round_robin", b"key_sha256"):
        assert secret not in kept


async def test_E10_without_the_bus_a_change_holds_here_and_later_everywhere(
    street: Street, http: aiohttp.ClientSession
) -> None:
    one, other = street.gateways
    await street.nats.stop()
    body = {"key": "sk-acme-0123456789"}
    assert not (await call(http, one, "PUT", "/router/tenants/acme", body))["shared"]
    assert await chat(http, one, body["key"]) == 200
    assert await chat(http, other, body["key"]) == 401
    assert one.services.fleet.alarms.active(OFFLINE, "router-0")
    await street.nats.start()
    await until_chat(http, other, body["key"], 200)
    await until(lambda: not one.services.fleet.alarms.active(OFFLINE, "router-0"))
