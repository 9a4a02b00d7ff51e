"""Adapters that can't be had somewhere: only they are avoided there, and the client hears why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from configs.model.card import ModelCard
from events.errors import ADAPTER_LOAD_FAILED
from events.load import AdapterNote
from replica.sched.refusals import adapter_failed
from tests.fakes.caching import CachingReplica
from tests.fakes.scripts import echo, refuse
from tests.router.gateway.house import COMPLETION, KEYS, House
from tests.router.gateway.test_hot import Library
from tests.waiting import until

PIRATE = AdapterNote("tiny/pirate", "content", False, 1.0)


@pytest.fixture
async def ship(tiny_card: ModelCard) -> AsyncIterator[Callable]:
    """`await ship(r0=AdapterNote, ...)`: a house with these replicas."""
    async with AsyncExitStack() as stack:

        async def make(**notes: AdapterNote) -> Library:
            house = Library(tiny_card, 0, {})
            house.adapters = {PIRATE.name: PIRATE.digest}
            await stack.enter_async_context(house)
            for name, note in notes.items():
                (await house.join(name, adapters=(note,))).script = echo
            return house

        yield make


async def ask(
    house: House, http: aiohttp.ClientSession, model: str = PIRATE.name
) -> tuple[int, str, Any]:
    """Status, who answered, and the body."""
    body = {**COMPLETION, "model": model}
    async with house.post(http, "/v1/completions", body, key=KEYS["alice"]) as response:
        who = response.headers.get("x-warmroute-replica", "")
        if response.status == 503:
            assert int(response.headers["Retry-After"]) >= 1
        return response.status, who, await response.json()


def tell(house: House, replica: CachingReplica, **changes: Any) -> None:
    """Its next hello."""
    (note,) = replica.adapters
    replica.adapters = (msgspec.structs.replace(note, **changes),)
    house.fleet.on_hello(replica.replica_id, replica.boot, replica.hello())


async def test_a_failed_load_sends_its_request_elsewhere_and_keeps_others_away(
    ship: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await ship(r0=PIRATE, r1=PIRATE)
    bad, good = house.replicas
    bad.script = refuse(adapter_failed(PIRATE.name, started=False))
    assert {(await ask(house, http))[:2] for _ in range(6)} == {(200, "r1")}
    asked = len(bad.calls)
    assert asked
    tell(house, bad, failing=True)
    assert {(await ask(house, http))[:2] for _ in range(4)} == {(200, "r1")}
    assert len(bad.calls) == asked
    bad.script = echo
    assert {(await ask(house, http, "tiny"))[1] for _ in range(8)} == {"r0", "r1"}
    tell(house, good, failing=True)
    status, _, said = await ask(house, http)
    assert (status, said["error"]["code"]) == (503, "no_replica")
    assert "adapter_failing" in said["error"]["message"]
    assert (await ask(house, http, "tiny"))[0] == 200
    tell(house, bad, failing=False)
    assert (await ask(house, http))[:2] == (200, "r0")
    await house.settled()


async def test_where_it_fails_everywhere_the_client_hears_of_the_adapter(
    ship: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await ship(r0=PIRATE)
    house.script(refuse(adapter_failed(PIRATE.name, started=False)))
    status, _, said = await ask(house, http)
    assert (status, said["error"]["code"]) == (503, ADAPTER_LOAD_FAILED)
    assert PIRATE.name in said["error"]["message"]
    assert house.fleet.member("r0").breaker.failures == 0
    await house.settled()


async def test_a_replica_with_another_content_of_it_serves_all_else(
    ship: Callable, http: aiohttp.ClientSession
) -> None:
    retrained = msgspec.structs.replace(PIRATE, digest="retrained", resident=True)
    house: Library = await ship(r0=PIRATE, r1=retrained)
    assert {(await ask(house, http))[:2] for _ in range(6)} == {(200, "r0")}
    first = house.replicas[0]
    first.draining = True
    await until(lambda: house.fleet.member("r0").load.draining)
    assert (await ask(house, http, "tiny"))[:2] == (200, "r1")
    status, _, said = await ask(house, http)
    assert (status, said["error"]["code"]) == (503, "no_replica")
    (alarm,) = [each for each in house.fleet.alarms if each.name == "adapter_mismatch"]
    assert (alarm.replica, PIRATE.name in alarm.detail) == ("r1", True)
    await house.settled()
