"""A gateway before replicas that compute and others that answer."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.fakes.replica import FakeReplica
from tests.fakes.scripts import Call, Script
from tests.router.gateway.house import ADMIN_KEY, COMPLETION, House

LONG = {**COMPLETION, "prompt": "a long prompt about many things " * 30}
STORE = ("host:/kvd",)


async def promise(house: House, http: aiohttp.ClientSession) -> None:
    """Gaps between tokens that nobody keeps: roles are needed."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{house.url}/router/tenants/anonymous"
    async with http.put(url, json={"itl_deadline_ms": 1.0}, headers=headers) as response:
        assert response.status == 200


async def enter(house: House, name: str, role: str, **changes: Any) -> FakeReplica:
    replica = house.new_replica(name, role=role, tiers=STORE, **changes)
    house.replicas.append(replica)
    await replica.__aenter__()
    replica.announce(house.fleet)
    await house.up(len(house.replicas))
    return replica


async def compute(call: Call) -> None:
    assert call.request.write_to == STORE[0]
    await call.write()


def compute_after(release: asyncio.Event) -> Script:
    async def slowly(call: Call) -> None:
        await release.wait()
        await call.write()

    return slowly


def by_role(house: House) -> tuple[FakeReplica, FakeReplica]:
    computes, answers = house.replicas
    return computes, answers


async def ask(house: House, http: aiohttp.ClientSession, **more: Any) -> dict[str, Any]:
    async with house.post(http, "/v1/completions", {**LONG, **more}) as response:
        assert response.status == 200, await response.text()
        return {**await response.json(), "headers": dict(response.headers)}


async def decision_of(house: House, http: aiohttp.ClientSession, answer: dict[str, Any]) -> Any:
    path = f"/router/decisions/{answer['headers']['x-warmroute-decision']}"
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.get(f"{house.url}{path}", headers=headers) as response:
        return (await response.json())["decision"]
