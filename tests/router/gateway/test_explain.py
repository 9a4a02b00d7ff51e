"""/router/explain: the choice without the request."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest

from tests.router.gateway.house import CHAT, KEYS, House
from tests.router.gateway.test_admin import call

SECRET_TEXT = "the merger with Mandarin Holdings is signed on Friday "
ASKED = {"messages": [{"role": "user", "content": SECRET_TEXT * 8}], "max_tokens": 8}


async def explain(house: House, http: aiohttp.ClientSession, **body: Any) -> tuple[int, Any]:
    return await call(house, http, "POST", "/router/explain", body)


async def test_explain_says_what_the_next_request_gets_and_keeps_nothing(
    house: House, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    status, cold = await explain(house, http, **ASKED, tenant="alice")
    assert status == 200, cold
    assert (cold["predicted_cached_tokens"], cold["max_tokens"], cold["tenant"]) == (0, 8, "alice")
    assert not house.calls
    assert house.idle()
    assert len(house.services.brain.decisions) == 0
    async with house.post(http, "/v1/chat/completions", CHAT | ASKED, key=KEYS["alice"]) as answer:
        replica = answer.headers["x-warmroute-replica"]
        prompt_tokens = (await answer.json())["usage"]["prompt_tokens"]
    _, warm = await explain(house, http, **ASKED, tenant="alice")
    assert (warm["replica"], warm["prompt_tokens"]) == (replica, prompt_tokens)
    matched = {of["replica"]: of["overlap_blocks"] for of in warm["candidates"]}
    assert matched[replica] == warm["prompt_blocks"] == prompt_tokens // 16
    assert sum(matched.values()) == matched[replica]
    assert {"score", "queue_ms", "digest_age_ms", "load_age_ms"} <= warm["candidates"][0].keys()
    assert (await explain(house, http, **ASKED))[1]["predicted_cached_tokens"] == 0
    for said in (str(cold), str(warm), caplog.text):
        assert "Mandarin" not in said


async def test_explain_takes_what_the_generating_routes_take(
    house: House, http: aiohttp.ClientSession
) -> None:
    status, bare = await explain(house, http, prompt=SECRET_TEXT)
    assert (status, bare["max_tokens"]) == (200, 16)
    whole = {**CHAT, "stream": True, "temperature": 0.5}
    assert (await explain(house, http, **whole))[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"prompt": "x", "tenant": 1}, 400, "tenant"),
        ({"prompt": "x", "tenant": "nobody"}, 404, None),
        ({"prompt": ["x", "y"]}, 400, "prompt"),
        ({"prompt": "x", "messages": []}, 400, None),
        ({"prompt": "x", "nope": 1}, 400, None),
        ({"prompt": "x", "max_tokens": 10**6}, 400, None),
        ({"prompt": "x", "model": "other"}, 404, None),
    ],
)
async def test_P11_explain_refuses_what_they_refuse(
    house: House, http: aiohttp.ClientSession, body: Any, status: int, param: str | None
) -> None:
    got, answer = await explain(house, http, **body)
    assert got == status, answer
    assert param is None or answer["error"]["param"] == param


async def test_explain_names_the_filter_and_nobody(build, http: aiohttp.ClientSession) -> None:
    house = await build(replicas=2)
    await house.replicas[0].die()
    await house.up(1)
    _, answer = await explain(house, http, **ASKED)
    filtered = {of["replica"]: of["filtered"] for of in answer["candidates"]}
    assert filtered["r1"] is None
    assert filtered["r0"] is not None
    await house.replicas[1].die()
    await house.up(0)
    status, answer = await explain(house, http, **ASKED)
    assert status == 200, answer
    why = "no replica can take the request now (no_link)"
    assert (answer["replica"], answer["reason"]) == (None, why)
    assert answer["retry_after_s"] > 0
