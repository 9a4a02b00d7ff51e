"""/router/shadow: set, reported, counted; requests go on whatever it does."""

from __future__ import annotations

import aiohttp
import pytest

from tests.router.gateway.house import CHAT, House
from tests.router.gateway.test_admin import call


async def ask(house: House, http: aiohttp.ClientSession, times: int) -> None:
    for _ in range(times):
        async with house.post(http, "/v1/chat/completions", CHAT) as response:
            assert response.status == 200


async def metrics(house: House, http: aiohttp.ClientSession) -> str:
    async with http.get(f"{house.url}/metrics") as response:
        return await response.text()


async def test_a_shadow_is_set_and_reported(house: House, http: aiohttp.ClientSession) -> None:
    _, report = await call(house, http, "GET", "/router/shadow")
    assert (report["policy"], report["shadow"], report["by_policy"]) == ("warmroute", None, {})
    assert "shadow_decisions_total{" not in await metrics(house, http)
    await call(house, http, "PUT", "/router/policy", {"policy": "round_robin"})
    status, report = await call(house, http, "PUT", "/router/shadow", {"policy": "random"})
    assert (status, report["shadow"]) == (200, "random")
    await ask(house, http, 4)
    assert [len(replica.calls) for replica in house.replicas] == [2, 2]
    _, report = await call(house, http, "GET", "/router/shadow")
    of = report["by_policy"]["round_robin"]
    assert of["compared"] == 4
    assert of["agreed"] == 4 - len(report["differences"])
    text = await metrics(house, http)
    agreed = f'warmroute_shadow_decisions_total{{result="agreed",shadow="random"}} {of["agreed"]}.0'
    assert agreed in text
    assert 'warmroute_shadow_predicted_ttft_seconds_total{side="shadow"}' in text
    _, report = await call(house, http, "PUT", "/router/shadow", {"policy": None})
    assert (report["shadow"], report["by_policy"]) == (None, {})


async def test_the_settings_can_name_a_shadow(build, http: aiohttp.ClientSession) -> None:
    house = await build(shadow_policy="least_load")
    await ask(house, http, 1)
    _, report = await call(house, http, "GET", "/router/shadow")
    assert (report["shadow"], report["by_policy"]["warmroute"]["compared"]) == ("least_load", 1)


async def test_a_shadow_that_raises_costs_no_request(
    house: House, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    await call(house, http, "PUT", "/router/shadow", {"policy": "round_robin"})
    monkeypatch.setattr("router.policies.round_robin.RoundRobin.pick", broken)
    await ask(house, http, 3)
    assert (await call(house, http, "GET", "/router/shadow"))[1]["failed"] == 3
    assert 'result="failed",shadow="round_robin"} 3.0' in await metrics(house, http)
    await house.settled()
