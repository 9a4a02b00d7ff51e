"""What is counted for each tenant, under few labels, and whose blocks are warm where."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TenantConfig
from events.decision import RouteDecision
from events.load import WarmBlocks
from events.secrets import tenant_tag
from router.choice.route import Outcome
from router.telemetry.tally import NAMED, OTHERS
from router.tenancy.shares import WarmShares
from router.tenancy.tags import TenantTags
from router.tenancy.tenant_tally import Tallies, merged
from router.tenancy.tenants import Tenants
from tests.router.gateway.house import ADMIN_KEY, CHAT, KEYS, House
from tests.router.kit import KEY, World, load, prompt

TAGS = TenantTags(KEY, Tenants(KEY, [TenantConfig(name=name) for name in "abc"]))


def test_labels_are_few_and_totals_are_kept() -> None:
    tallies = Tallies()
    for number in range(3 * NAMED):
        tallies.asked(f"t{number}")
    assert len(tallies.by_label) == NAMED + 1
    assert tallies.by_label[OTHERS].requests == 2 * NAMED
    tallies.of("t0").wait.observe(1.0)
    tallies.forget("t0")
    assert tallies.by_label[OTHERS].requests == 2 * NAMED + 1
    assert tallies.by_label[OTHERS].wait.total == 1.0
    assert sum(tally.requests for tally in tallies.by_label.values()) == 3 * NAMED
    assert dict(merged({"t1": 2, "t0": 3, "x": 4}, tallies)) == {("t1",): 2, (OTHERS,): 7}


def ended(world: World, shares: WarmShares, tenant: str, tokens: int, cached: int = 0) -> None:
    decision: RouteDecision = world.decide(prompt((1, 4)), tenant=tenant)
    world.end(decision, "ok")
    outcome = Outcome("ok", False, cached_tokens=cached, prompt_tokens=tokens, ttft_ms=1.0)
    shares.ended(decision, outcome)


def test_S6_a_share_is_what_was_computed_last() -> None:
    world = World(1)
    shares = WarmShares(world.fleet, TAGS)
    ended(world, shares, "a", 4_000 * 16)
    assert shares.of("a") == {"r0": 4_000}
    ended(world, shares, "b", 196 * 16, cached=100 * 16)
    assert (shares.of("a"), shares.of("b")) == ({"r0": 4_000}, {"r0": 96})
    ended(world, shares, "b", 1_000 * 16)
    assert shares.totals() == {"a": 3_000, "b": 1_096}
    world.join("r0", boot=2)
    assert not shares.totals()


def test_S6_a_share_is_what_the_replica_tells_where_it_does() -> None:
    world = World(2)
    shares = WarmShares(world.fleet, TAGS)
    ended(world, shares, "a", 4_000 * 16)
    told = tuple(WarmBlocks(tenant_tag(KEY, name), of) for name, of in (("b", 90), ("gone", 5)))
    for replica in ("r0", "r1"):
        world.fleet.on_load(replica, 1, msgspec.structs.replace(load(), warm=told))
    assert (shares.of("a"), shares.of("b")) == ({}, {"r0": 90, "r1": 90})
    assert sorted(shares.totals().values()) == [10, 180]
    assert "gone" not in shares.totals()
    world.fleet.on_load("r1", 1, msgspec.structs.replace(load(), warm=()))
    assert shares.of("b") == {"r0": 90}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9_000)), max_size=30))
def test_shares_never_sum_to_more_than_there_is(asked: list[tuple[str, int]]) -> None:
    world = World(1)
    shares = WarmShares(world.fleet, TAGS)
    for tenant, blocks in asked:
        ended(world, shares, tenant, blocks * 16)
        assert shares.totals().total() <= 4_096
    computed = sum(blocks for _, blocks in asked)
    assert shares.totals().total() == min(4_096, computed)


async def test_tenants_have_their_own_figures(house: House, http: aiohttp.ClientSession) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "word " * 50}]}
    for name, times in (("alice", 2), ("bob", 1)):
        for _ in range(times):
            async with house.post(http, "/v1/chat/completions", long, key=KEYS[name]) as response:
                assert response.status == 200
    async with http.get(f"{house.url}/metrics") as response:
        told = await response.text()
    assert 'warmroute_tenant_requests_total{tenant="alice"} 2.0' in told
    assert 'warmroute_tenant_requests_total{tenant="bob"} 1.0' in told
    assert 'warmroute_tenant_ttft_seconds_count{tenant="alice"} 2.0' in told
    assert 'warmroute_tenant_wait_seconds_count{tenant="bob"} 1.0' in told
    assert 'warmroute_tenant_warm_blocks{tenant="alice"}' in told
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.get(f"{house.url}/router/tenants", headers=headers) as response:
        listed: dict[str, Any] = {of["name"]: of for of in (await response.json())["tenants"]}
    assert sum(listed["alice"]["warm_blocks"].values()) > 0
    assert listed["anonymous"]["warm_blocks"] == {}
