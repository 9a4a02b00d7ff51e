"""Two gateways over one bus: a burst is spread as by one; what one has sent the other counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from configs.model.card import ModelCard
from configs.schema import TenantConfig
from router.services import Services
from tests.fakes.scripts import stall
from tests.router.gateway.house import CHAT, COMPLETION
from tests.router.gateway.street import Street
from tests.waiting import until


@pytest.fixture
async def street(tiny_card: ModelCard, tmp_path: Path) -> AsyncIterator[Street]:
    """Eight replicas that are slow to answer, behind two routers."""
    async with Street(tiny_card, tmp_path, replicas=8) as street:
        yield street


def post(
    http: aiohttp.ClientSession, street: Street, router: int, number: int
) -> asyncio.Task[int]:
    """A prompt of its own to that router, on one of both endpoints, streamed or not; gives the
    status."""
    text, stream = f"{number} is the number of this prompt " * 9, number % 8 >= 4
    path, body = [
        ("/v1/completions", {**COMPLETION, "prompt": text}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
    ][number // 2 % 2]

    async def ask() -> int:
        url = f"{street.gateways[router].url}{path}"
        async with http.post(url, json={**body, "stream": stream}) as response:
            await response.read()
            return response.status

    return asyncio.create_task(ask())


def calls(street: Street) -> list[int]:
    return [len(fake.calls) for fake in street.fakes.values()]


async def test_R1_two_routers_take_the_idle_replicas_in_turn(
    street: Street, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    for fake in street.fakes.values():
        fake.script = stall(release)
    asked = []
    for number in range(8):
        asked.append(post(http, street, number % 2, number))
        await until(lambda number=number: sum(calls(street)) == number + 1)
        await street.synced()
    assert calls(street) == [1] * 8
    release.set()
    assert set(await asyncio.gather(*asked)) == {200}
    await street.synced()
    for gateway in street.gateways:
        brain = gateway.services.brain
        assert brain.peers.open == 0
        assert all(brain.ledger.booked(name).requests == 0 for name in street.names)


async def test_R1_a_burst_over_two_routers_is_spread_as_by_one(
    street: Street, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    for fake in street.fakes.values():
        fake.script = stall(release)
    asked = [post(http, street, number % 2, number) for number in range(64)]
    await until(lambda: sum(calls(street)) == 64)
    assert max(calls(street)) <= 10
    assert min(calls(street)) >= 6
    release.set()
    assert set(await asyncio.gather(*asked)) == {200}


async def test_R1_what_a_report_shows_is_not_counted_twice_by_anybody(
    street: Street, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    for fake in street.fakes.values():
        fake.script = stall(release)
    asked = post(http, street, 0, 1)
    await until(lambda: sum(calls(street)) == 1)
    await street.synced()
    (name,) = (name for name, fake in street.fakes.items() if fake.calls)
    request = street.fakes[name].calls[0].request
    street.say(name, waiting=1, seen={request.router_boot: request.dispatch_seq})
    other = street.gateways[1].services
    member = other.fleet.member(name)
    await until(lambda: member.load.seen != {})
    second = post(http, street, 1, 2)
    await until(lambda: sum(calls(street)) == 2)
    assert other.brain.peers.open == 0
    release.set()
    assert await asyncio.gather(asked, second) == [200, 200]


async def test_a_router_that_ends_leaves_nothing_behind_and_one_that_comes_late_learns(
    street: Street, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    for fake in street.fakes.values():
        fake.script = stall(release)
    asked = [post(http, street, 0, number) for number in range(3)]
    await until(lambda: sum(calls(street)) == 3)
    await street.synced()
    await street.gateways.pop(1).close()
    again = await street.gateway("router-1")
    street.gateways.append(again)
    await street.met()
    await street.synced()
    assert again.services.brain.peers.open == 3
    assert len(street.gateways[0].services.brain.peers) == 1
    release.set()
    await asyncio.gather(*asked)


async def test_who_is_there_can_be_looked_up(street: Street, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{street.gateways[0].url}/router/peers") as response:
        told = await response.json()
    assert told["router"] == "router-0"
    (peer,) = told["peers"]
    assert (peer["router"], peer["open"], peer["whole"]) == ("router-1", 0, True)


async def test_E9_after_an_outage_of_the_bus_both_know_again(
    street: Street, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    for fake in street.fakes.values():
        fake.script = stall(release)
    await street.nats.stop()
    asked = [post(http, street, number % 2, number) for number in range(4)]
    await until(lambda: sum(calls(street)) == 4)
    await street.nats.start()
    await street.synced()
    release.set()
    assert set(await asyncio.gather(*asked)) == {200}
    await street.synced()


async def test_a_tenants_limit_holds_over_both_routers(
    street: Street, http: aiohttp.ClientSession
) -> None:
    """Three requests a minute, however they are spread."""
    for gateway in street.gateways:
        gateway.services.tenants.take(TenantConfig(name="anonymous", requests_per_min=3))
    statuses = []
    for number in range(6):
        statuses.append(await post(http, street, number % 2, number))
        await until(lambda: len({remaining(of.services) for of in street.gateways}) == 1)
    assert (statuses.count(200), statuses.count(429)) == (3, 3)


def remaining(services: Services) -> str:
    """What is left of the limit, as this router sees it."""
    account = services.admitter.limits.account(services.tenants.anonymous)
    return account.headers()["x-ratelimit-remaining-requests"]
