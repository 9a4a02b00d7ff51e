"""What a tenant may use a minute and at once, alone and through the whole gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TenantPolicy
from events.errors import UserError
from router.tenancy.limits import OWED_MIN, Bucket, Limits
from router.tenancy.tenants import Tenant
from tests.fakes.scripts import stall
from tests.router.gateway.house import ADMIN_KEY, CHAT, KEYS, House
from tests.router.kit import inside
from tests.waiting import until

ALICE = KEYS["alice"]


def tenant(**policy: Any) -> Tenant:
    return Tenant("t", "private", b"", "", TenantPolicy(**policy))


def limits(now: list[float]) -> Limits:
    return Limits(lambda: now[0])


def test_requests_a_minute_refill_continuously() -> None:
    now = [0.0]
    of = limits(now)
    limited = tenant(requests_per_min=60)
    for _ in range(60):
        with inside(of.account(limited)):
            pass
    with pytest.raises(UserError) as caught, inside(of.account(limited)):
        pass
    refusal = caught.value.error
    assert (refusal.status, refusal.type, refusal.code) == (429, "requests", "rate_limit_exceeded")
    assert refusal.retry_after_s == pytest.approx(1.0)
    now[0] += 1.0
    with inside(of.account(limited)):
        pass
    assert of.account(limited).tally.refused == {"requests": 1}


def test_tokens_are_corrected_by_what_came() -> None:
    now = [0.0]
    of = limits(now)
    account = of.account(tenant(tokens_per_min=600))
    account.book_tokens(500)
    with pytest.raises(UserError) as caught:
        account.book_tokens(200)
    assert (caught.value.error.status, caught.value.error.type) == (429, "tokens")
    assert caught.value.error.retry_after_s >= 10
    account.correct_tokens(-300)
    account.book_tokens(200)
    account.correct_tokens(800)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
    now[0] += 60.0
    with pytest.raises(UserError):
        account.book_tokens(200)
    with pytest.raises(UserError) as never:
        account.book_tokens(601)
    assert never.value.error.status == 413


def test_a_changed_limit_keeps_what_was_used() -> None:
    now = [0.0]
    of = limits(now)
    of.account(tenant(tokens_per_min=600)).book_tokens(500)
    changed = of.account(tenant(tokens_per_min=1_000))
    assert changed.headers() == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert of.account(tenant()).headers() == {}


@given(
    per_min=st.integers(1, 1_000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40),
)
def test_a_bucket_never_gives_more_than_its_rate(
    per_min: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now_s, given_ = Bucket(per_min, 0.0), 0.0, 0
    for pause_s, amount in steps:
        now_s += pause_s
        if not bucket.wait_s(amount, now_s):
            bucket.take(amount)
            given_ += amount
        assert given_ <= per_min * (1 + now_s / 60) + 1e-6
        assert bucket.level(now_s) <= per_min


async def change(house: House, http: aiohttp.ClientSession, **policy: Any) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{house.url}/router/tenants/alice"
    async with http.put(url, json=policy, headers=headers) as response:
        assert response.status == 200
        assert (await response.json()).items() >= policy.items()


async def test_O3_over_its_limit_a_tenant_is_told_when_to_come_again(
    house: House, http: aiohttp.ClientSession
) -> None:
    await change(house, http, requests_per_min=1, tokens_per_min=10_000)
    async with house.post(http, "/v1/chat/completions", CHAT, key=ALICE) as response:
        assert response.status == 200
        assert response.headers["x-ratelimit-limit-requests"] == "1"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) < 10_000
        usage = (await response.json())["usage"]
    async with house.post(http, "/v1/chat/completions", CHAT, key=ALICE) as response:
        assert response.status == 429
        assert (await response.json())["error"]["type"] == "requests"
        assert 59 <= int(response.headers["Retry-After"]) <= 60
        remaining = int(response.headers["x-ratelimit-remaining-tokens"])
        assert 10_000 - usage["total_tokens"] <= remaining <= 10_000
    async with house.post(http, "/v1/chat/completions", CHAT, key=KEYS["bob"]) as response:
        assert response.status == 200
        assert "x-ratelimit-limit-requests" not in response.headers


async def test_S6_a_tenants_share_of_what_stays_warm_reaches_the_replica(
    house: House, http: aiohttp.ClientSession
) -> None:
    assert await chat(house, http) == 200
    await change(house, http, warm_share=0.125)
    assert await chat(house, http) == 200
    # By replica, not by time: the two may have gone to either.
    assert {call.request.warm_share for call in house.calls} == {0.5, 0.125}


async def test_requests_at_once_are_counted_and_given_back(
    house: House, http: aiohttp.ClientSession
) -> None:
    await change(house, http, max_concurrent=1)
    release = asyncio.Event()
    house.script(stall(release))
    first = asyncio.create_task(chat(house, http))
    await until(lambda: len(house.calls) == 1)
    assert await chat(house, http) == 429
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await house.settled()
    release.set()
    assert await chat(house, http) == 200


async def chat(house: House, http: aiohttp.ClientSession) -> int:
    async with house.post(http, "/v1/chat/completions", CHAT, key=ALICE) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, (0, 120_000.0, None, 1.0)),
        ({"priority": 7, "deadline_class": "interactive"}, (7, 10_000.0, 250.0, 1.0)),
        ({"priority": 7, "deadline_class": "batch"}, (-100, 600_000.0, None, 1.0)),
        ({"ttft_deadline_ms": 1_500.0, "weight": 4.0}, (0, 1_500.0, None, 4.0)),
        ({"itl_deadline_ms": 40.0, "deadline_class": "interactive"}, (0, 10_000.0, 40.0, 1.0)),
    ],
)
async def test_priority_weight_and_deadlines_reach_the_replica(
    build: Callable, http: aiohttp.ClientSession, policy: dict[str, Any], expected: tuple
) -> None:
    house = await build(1)
    if policy:
        await change(house, http, **policy)
    assert await chat(house, http) == 200
    asked = house.calls[0].request
    assert (asked.priority, asked.itl_deadline_ms) == (expected[0], expected[2])
    assert asked.weight == expected[3]
    assert asked.ttft_deadline_ms == pytest.approx(expected[1], abs=1_000.0)


def test_whatever_others_tell_a_tenant_is_back_within_minutes() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(1_000):
        bucket.take(10**9)
    assert bucket.wait_s(1, 0.0) <= 60 * OWED_MIN + 1
