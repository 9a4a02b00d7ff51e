"""S6 in virtual time: who floods the fleet waits in his own line."""

from __future__ import annotations

import asyncio

import pytest

from router.tenancy.tenants import Tenant
from tests.router.waiting.engines import Engines
from tests.router.waiting.fleet import Fleet, p95, tenant, unique

FLOOD, POLITE = tenant("flood"), tenant("polite")
STREAMS = 50
LONG_TOKENS = 8_000
LONG_S = 3.2
"""What such a prompt takes alone."""


async def measure(fleet: Fleet, flood: bool, prompt_tokens: int = 1_024, asked: int = 60) -> list:
    """TTFTs of one request a second, beside 50 streams of unique prompts or alone."""

    async def stream() -> None:
        while True:
            await fleet.ask(FLOOD, unique(prompt_tokens))

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS if flood else 0)]
    await asyncio.sleep(20)
    polite = []
    for _ in range(asked):
        polite.append(asyncio.create_task(fleet.ask(POLITE, unique(prompt_tokens))))
        await asyncio.sleep(1.0)
    ttfts = await asyncio.gather(*polite)
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return ttfts


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.25])
async def test_S6_beside_a_flood_the_first_token_comes_within_twice_the_time(
    slowness: float,
) -> None:
    async with Fleet(4, slowness=slowness) as fleet:
        alone = p95(await measure(fleet, flood=False))
    async with Fleet(4, slowness=slowness) as fleet:
        beside = p95(await measure(fleet, flood=True))
        assert max(replica.most_waiting for replica in fleet.replicas.values()) <= 2
    assert beside < 2 * alone


async def test_S6_the_fleet_is_kept_busy_and_shared_by_weight() -> None:
    tenants = [tenant("a"), tenant("b", weight=3.0)]
    begun = dict.fromkeys("ab", 0)

    async def stream(of: Tenant) -> None:
        while True:
            await fleet.ask(of, unique(1_024))
            begun[of.name] += 1

    async with Fleet(3) as fleet:
        streams = [asyncio.create_task(stream(of)) for of in tenants for _ in range(20)]
        await asyncio.sleep(200)
        computed = sum(replica.computed_tokens for replica in fleet.replicas.values())
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert computed > 0.98 * 3 * 200 * 1_000
        assert begun["b"] / begun["a"] == pytest.approx(3.0, rel=0.1)
        assert (fleet.queue.requests, fleet.queue.tokens) == (0, 0)


async def test_S6_who_asks_at_two_routers_gets_no_second_turn() -> None:
    begun = dict.fromkeys("ab", 0)

    async def stream(of: Tenant, router: int) -> None:
        while True:
            await fleet.ask(of, unique(1_024), router=router)
            begun[of.name] += 1

    async with Fleet(3, routers=2) as fleet:
        everywhere = [(tenant("a"), number % 2) for number in range(40)]
        here = [(tenant("b"), 0)] * 20
        streams = [asyncio.create_task(stream(*of)) for of in everywhere + here]
        await asyncio.sleep(90)
        computed = sum(replica.computed_tokens for replica in fleet.replicas.values())
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert computed > 0.97 * 3 * 90 * 1_000
        assert begun["b"] / begun["a"] == pytest.approx(1.0, rel=0.15), begun


async def test_S6_what_is_warm_passes_soon() -> None:
    system = unique(2_048)
    async with Fleet(2) as fleet:
        fleet.world.hold("r0", system)
        fleet.world.hold("r1", system)
        streams = [asyncio.create_task(fleet.ask(FLOOD, unique(4_096))) for _ in range(40)]
        await asyncio.sleep(10)
        began = [asyncio.create_task(fleet.ask(POLITE, system, 1)) for _ in range(20)]
        ttfts = await asyncio.gather(*began)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert max(ttfts) < 2 * 4.1 + 1


@pytest.mark.parametrize("asks", [FLOOD, POLITE], ids=["same tenant", "another"])
async def test_S6_beside_a_flood_of_long_prompts_short_ones_wait_for_nobody(asks: Tenant) -> None:
    """Real schedulers: what is short is sent while they are busy, and goes first there."""
    long = 0

    async def stream() -> None:
        nonlocal long
        while True:
            await engines.ask(FLOOD, engines.unique(LONG_TOKENS), 8)
            long += 1

    async def chat() -> float:
        return await engines.ask(asks, engines.unique(200), 8)

    engines = Engines(2, "a10g-7b")
    streams = [asyncio.create_task(stream()) for _ in range(20)]
    await asyncio.sleep(10)
    engines.waits_s.clear()
    long_before, asked = long, []
    for _ in range(20):
        asked.append(asyncio.create_task(chat()))
        await asyncio.sleep(1.0)
    ttfts = await asyncio.gather(*asked)
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    engines.close()
    assert engines.waits_s[POLITE.name] == [0.0] * (20 if asks is POLITE else 0)
    assert sum(wait_s == 0.0 for wait_s in engines.waits_s[asks.name]) >= 20
    assert p95(ttfts) < LONG_S / 3
    assert long - long_before == pytest.approx(20 * 2 / LONG_S, rel=0.1)
