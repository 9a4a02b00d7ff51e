"""One model, replicas whose blocks are named differently: while block size or dtype roll over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import aiohttp
import msgspec
import pytest

from events.errors import CoreError
from events.load import ReplicaHello
from events.secrets import link_secret
from router.openai.stream import DONE
from tests.fakes.replica import FakeReplica
from tests.fakes.scripts import die_in_stream, echo, refuse, stall
from tests.router.gateway.house import ADMIN_KEY, SECRET, STREAM, House, chat_status
from tests.waiting import until

FULL = CoreError(status=429, message="full", code="queue_full", retry_after_s=3, reroute=True)


class Rolled(FakeReplica):
    """One with the dtype that all shall have."""

    def hello(self) -> ReplicaHello:
        hello = super().hello()
        return msgspec.structs.replace(
            hello, layout=msgspec.structs.replace(hello.layout, dtype="bfloat16")
        )


async def roll(house: House) -> None:
    """One more replica, of the new pool."""
    key = bytes.fromhex(SECRET)
    rolled = Rolled("new", secret=link_secret(key), cluster_key=key, model=house.card)
    house.replicas.append(rolled)
    await rolled.__aenter__()
    rolled.announce(house.fleet)
    await house.up(len(house.replicas))


@pytest.fixture
async def half(build: Callable) -> House:
    """Two of the old pool, one of the new one."""
    house: House = await build(replicas=2)
    await roll(house)
    assert len(house.fleet.pools()) == 2
    return house


async def test_all_pools_of_a_revision_are_asked_by_what_they_cost(
    half: House, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    half.script(stall(release))
    asking = [asyncio.create_task(chat_status(half, http)) for _ in range(24)]
    await until(lambda: len(half.calls) == 24)
    placed = Counter(call.replica.replica_id for call in half.calls)
    assert all(6 <= count <= 10 for count in placed.values()), placed
    release.set()
    assert await asyncio.gather(*asking) == [200] * 24
    await half.settled()


@pytest.mark.parametrize("alone", ["new", "r0"])
async def test_R10_a_pool_that_is_gone_refuses_nothing_while_another_one_answers(
    half: House, http: aiohttp.ClientSession, alone: str
) -> None:
    for replica in half.replicas:
        if replica.replica_id != alone:
            replica.script = refuse(FULL)
    for _ in range(5):
        assert await chat_status(half, http) == 200
    for replica in half.replicas:
        if replica.replica_id != alone:
            await replica.die()
    await half.up(1)
    for _ in range(5):
        assert await chat_status(half, http) == 200
    await half.settled()


async def test_who_waits_for_a_full_pool_is_let_go_where_another_one_has_room(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house: House = await build(replicas=1, prefill_ahead_ms=1.0)
    release = asyncio.Event()
    house.script(stall(release))
    asking = [asyncio.create_task(chat_status(house, http)) for _ in range(2)]
    await until(lambda: house.services.admitter.queue.requests == 1)
    await roll(house)
    asking.append(asyncio.create_task(chat_status(house, http)))
    await until(lambda: len(house.replicas[-1].calls) == 1)
    release.set()
    assert await asyncio.gather(*asking) == [200] * 3
    await house.settled()


async def test_R16_a_broken_stream_goes_on_in_another_pool(
    half: House, http: aiohttp.ClientSession
) -> None:
    half.script(die_in_stream)
    half.replicas[-1].script = echo
    bodies = []
    for _ in range(3):
        async with half.post(http, "/v1/chat/completions", STREAM) as response:
            bodies.append(await response.read())
    assert all(body.endswith(DONE) for body in bodies)
    assert any(call.continuing for call in half.replicas[-1].calls)
    await half.settled()


async def test_a_prompt_is_warmed_in_every_pool(half: House, http: aiohttp.ClientSession) -> None:
    body = {"prompt": "word " * 60, "replicas": 3}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.post(f"{half.url}/router/warm", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
    assert {call.replica.replica_id for call in half.calls} == {"r0", "r1", "new"}


async def test_a_decision_shows_the_candidates_of_all_pools_that_were_asked(
    half: House, http: aiohttp.ClientSession
) -> None:
    assert await chat_status(half, http) == 200
    (record,) = half.services.brain.decisions.latest(1)
    shown = record.decision.candidates
    assert {of.replica for of in shown} == {"r0", "r1", "new"}
    assert shown[0].replica == record.decision.replica
    of_pool = {of.replica: of.pool for of in shown}
    assert {*of_pool.values()} == half.fleet.pools().keys()
    assert of_pool["r0"] == of_pool["r1"] != of_pool["new"]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url, body = f"{half.url}/router/explain", {"prompt": "word " * 60}
    async with http.post(url, json=body, headers=headers) as response:
        explained = await response.json()
    assert {of["replica"]: of["pool"] for of in explained["candidates"]} == of_pool
    url = f"{half.url}/router/decisions/{record.decision.decision_id}"
    async with http.get(url, headers=headers) as response:
        told = await response.text()
    assert all(f'"{pool}"' in told for pool in of_pool.values())
    await half.settled()


async def test_where_one_pool_was_asked_none_is_named(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house: House = await build(replicas=2)
    assert await chat_status(house, http) == 200
    (record,) = house.services.brain.decisions.latest(1)
    assert [of.pool for of in record.decision.candidates] == ["", ""]
    await house.settled()
