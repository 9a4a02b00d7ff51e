"""A bound at every stage, and what is said of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from router.serving.bodies import Bodies
from router.waiting.comebacks import ELSEWHERE, MAX_OWED, MAX_TENANTS, Comebacks
from router.waiting.held import Held
from tests.fakes.scripts import stall
from tests.router.gateway.house import ADMIN_KEY, CHAT, COMPLETION, KEYS, House
from tests.waiting import until


def test_what_is_held_knows_its_age_and_its_bound() -> None:
    now = [10.0]
    held = Held(100, lambda: now[0])
    held.add("a", 60)
    now[0] = 12.0
    held.add("b", 40)
    assert (held.depth, len(held), held.oldest_s(), held.fits(1)) == (100, 2, 2.0, False)
    held.remove("a")
    held.remove("a")
    assert (held.depth, held.oldest_s(), held.fits(60)) == (40, 0.0, True)


async def metrics(house: House, http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get(f"{house.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


STAGES = (
    "connections requests body tokenise tokens queue queue_tokens link kv output".split()
)  # in the order of a request's way


async def test_O4_every_stage_tells_depth_bound_age_and_refusals(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(1, prefill_ahead_ms=1.0, max_queued_requests=2)
    release = asyncio.Event()
    house.script(stall(release))
    asked = [
        asyncio.create_task(post(house, http, {**COMPLETION, "prompt": f"{n} " * 90}))
        for n in range(2)
    ]
    await until(lambda: house.services.admitter.queue.requests == 1)
    assert await post(house, http, {**COMPLETION, "prompt": "x " * 90}) == 429
    told = await metrics(house, http)
    for stage in STAGES:
        assert told[f'warmroute_stage_limit{{stage="{stage}"}}'] > 0
        assert told[f'warmroute_stage_depth{{stage="{stage}"}}'] >= 0
        assert told[f'warmroute_stage_oldest_seconds{{stage="{stage}"}}'] >= 0
    assert told['warmroute_stage_depth{stage="queue"}'] == 1
    assert told['warmroute_stage_oldest_seconds{stage="queue"}'] > 0
    assert told['warmroute_stage_depth{stage="requests"}'] == 2
    assert told['warmroute_stage_refused_total{reason="full",stage="queue_tokens"}'] == 1
    release.set()
    assert await asyncio.gather(*asked) == [200, 200]
    again = {"x-stainless-retry-count": "1"}
    for _ in range(2):
        async with http.post(f"{house.url}/v1/completions", json=COMPLETION, headers=again) as came:
            assert came.status == 200
    await house.settled()
    told = await metrics(house, http)
    for stage in STAGES[1:]:
        assert told[f'warmroute_stage_depth{{stage="{stage}"}}'] == 0
    retried = {stage: told[f'warmroute_stage_retried_total{{stage="{stage}"}}'] for stage in STAGES}
    assert {stage for stage, count in retried.items() if count} == {"queue_tokens"}
    assert told["warmroute_client_retries_total"] == 2


def test_what_comes_again_is_what_its_tenant_was_refused_first() -> None:
    comebacks = Comebacks()
    for stage in ("tokens", "queue_tokens"):
        comebacks.refused("a", stage)
    comebacks.came("b")
    for _ in range(3):
        comebacks.came("a")
    assert comebacks.by_stage == {"tokens": 1, "queue_tokens": 1, ELSEWHERE: 2}
    for number in range(MAX_TENANTS + 1):
        for _ in range(MAX_OWED + 1):
            comebacks.refused(f"t{number}", "body")
    comebacks.came("t0")
    assert comebacks.by_stage["body"] == 0
    for _ in range(MAX_OWED + 1):
        comebacks.came("t1")
    assert comebacks.by_stage["body"] == MAX_OWED


async def post(
    house: House, http: aiohttp.ClientSession, body: dict[str, Any], key: str | None = None
) -> int:
    async with house.post(http, "/v1/completions", body, key=key) as response:
        await response.read()
        return response.status


async def test_O4_bodies_that_are_being_read_are_bounded_together(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(1, max_reading_bytes=100_000)
    host, port = house.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99900\r\n\r\n"
    writer.write(head.encode() + b"{")
    held = house.services.bodies.held
    await until(lambda: held.depth == 99_900)
    async with house.post(http, "/v1/completions", {**COMPLETION, "prompt": "x" * 200}) as refused:
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
    writer.close()
    await writer.wait_closed()
    await until(lambda: held.depth == 0)
    assert await post(house, http, COMPLETION) == 200
    assert held.refused == {"full": 1}


def test_one_body_may_always_be_read() -> None:
    bodies = Bodies(10)
    with bodies._counted(1_000):
        assert bodies.held.depth == 1_000
    assert bodies.held.depth == 0


async def change(house: House, http: aiohttp.ClientSession, **policy: Any) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{house.url}/router/tenants/alice"
    async with http.put(url, json=policy, headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("allowed", [["max_tokens", "n", "logprobs", "batch"], ["n"], []])
async def test_while_much_waits_requests_are_made_less_as_the_tenant_allows(
    build: Callable, http: aiohttp.ClientSession, allowed: list[str]
) -> None:
    house = await build(1, prefill_ahead_ms=1.0, max_queued_requests=8)
    await change(house, http, degrade=allowed)
    release = asyncio.Event()
    house.script(stall(release))
    rich = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 300}
    bodies = [{**CHAT, "messages": [{"role": "user", "content": f"{n} " * 90}]} for n in range(3)]
    waiting = [asyncio.create_task(chat(house, http, body, KEYS["bob"])) for body in bodies]
    await until(lambda: house.services.admitter.queue.requests == 2)
    less = asyncio.create_task(chat(house, http, rich, KEYS["alice"]))
    await until(lambda: house.services.admitter.queue.requests == 3)
    release.set()
    await asyncio.gather(*waiting)
    headers, answer = await less
    said = [name for name in headers.get("x-warmroute-degraded", "").split(", ") if name]
    assert said == allowed
    assert len(answer["choices"]) == (1 if "n" in allowed else 2)
    tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert bool(tops) == ("logprobs" not in allowed)
    (served,) = (call.request for call in house.calls if call.request.tenant == "alice")
    assert served.sampling.max_tokens == (256 if "max_tokens" in allowed else 300)
    assert served.priority == (-100 if "batch" in allowed else 0)
    headers, _ = await chat(house, http, rich, KEYS["alice"])
    assert "x-warmroute-degraded" not in headers


async def chat(house: House, http: aiohttp.ClientSession, body: dict, key: str) -> tuple:
    async with house.post(http, "/v1/chat/completions", body, key=key) as response:
        assert response.status == 200
        return response.headers, await response.json()
