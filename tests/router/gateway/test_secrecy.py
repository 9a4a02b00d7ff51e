"""What nobody else may see or reach: texts, salts, other tenants' caches, the admin's routes."""

from __future__ import annotations

import logging
import socket

import aiohttp
import pytest

from tests.router.gateway.house import (
    ADMIN_KEY,
    CHAT,
    KEYS,
    House,
    status_of,
)
from tests.waiting import until


async def test_O8_no_content_in_logs_metrics_bus_or_foreign_answers(
    house: House, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "CANARY-7f3a"
    caplog.set_level(logging.INFO)
    heard: list[bytes] = []
    await house.bus.subscribe("*.*.*.*.*.*", lambda subject, payload: heard.append(payload))
    bodies = [
        {**CHAT, "messages": [{"role": "user", "content": canary}]},
        {**CHAT, "messages": [{"role": canary, "content": canary}]},
        {**CHAT, canary: canary},
        {**CHAT, "stop": [canary], "user": canary, "metadata": {canary: canary}},
        {**CHAT, "messages": canary},
        {**CHAT, "temperature": canary},
    ]
    answers = []
    for body in bodies:
        headers = {"Authorization": f"Bearer {KEYS['alice']}", "x-request-id": "fine"}
        async with http.post(
            f"{house.url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            answers.append(await response.text())
    async with http.post(
        f"{house.url}/v1/chat/completions", data=b'{"' + canary.encode()
    ) as response:
        answers.append(await response.text())
    async with http.get(f"{house.url}/router/decisions") as response:
        answers.append(await response.text())
    await until(lambda: len(heard) >= 4)
    telling = [answer for answer in answers if canary in answer]
    assert len(telling) == 1, "only the name of an unknown field is told back to its sender"
    assert "unknown_parameter" in telling[0]
    assert canary not in caplog.text
    assert canary.encode() not in b"".join(heard)
    assert KEYS["alice"].encode() not in b"".join(heard)
    assert canary not in house.services.metrics.text().decode()


async def test_O8_an_unexpected_error_is_logged_without_its_text(
    house: House, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CANARY-in-an-exception")

    house.services.renderer.chat = broken
    assert await status_of(house, http, "/v1/chat/completions", CHAT) == 500
    assert "unexpected RuntimeError" in caplog.text
    assert "CANARY" not in caplog.text


async def test_S2_the_salt_comes_from_the_tenant_alone(
    house: House, http: aiohttp.ClientSession
) -> None:
    for key in KEYS.values():
        async with house.post(http, "/v1/chat/completions", CHAT, key=key) as response:
            assert response.status == 200
    by_tenant = {call.request.tenant: call.request.salt for call in house.calls}
    assert by_tenant["alice"] != by_tenant["bob"]
    async with house.post(
        http, "/v1/chat/completions", {**CHAT, "cache_salt": "alice"}, key=KEYS["bob"]
    ) as response:
        assert response.status == 400
    again = await salt_of(house, http, KEYS["alice"])
    assert again == by_tenant["alice"]


async def salt_of(house: House, http: aiohttp.ClientSession, key: str) -> bytes:
    before = {id(call) for call in house.calls}
    async with house.post(http, "/v1/chat/completions", CHAT, key=key) as response:
        assert response.status == 200
    return next(call for call in house.calls if id(call) not in before).request.salt


async def test_S2_another_tenants_prediction_is_a_miss(
    house: House, http: aiohttp.ClientSession
) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "the same long words " * 30}]}

    async def predicted(key: str) -> int:
        async with house.post(http, "/v1/chat/completions", long, key=key) as response:
            decision = response.headers["x-warmroute-decision"]
        return house.services.brain.decisions.get(decision).decision.predicted_cached_tokens

    assert await predicted(KEYS["alice"]) == 0
    assert await predicted(KEYS["alice"]) > 0
    assert await predicted(KEYS["bob"]) == 0


async def test_S1_random_bytes_and_pickles_at_the_port(
    house: House, http: aiohttp.ClientSession
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    for junk in (b"\x80\x04\x95\0\0\0\0.", b"\0" * 4_096, b"GET / HTTP/9.9\r\n\r\n", b"\xff" * 99):
        client = socket.create_connection((host, int(port)))
        client.sendall(junk)
        client.close()
    assert await status_of(house, http, "/v1/chat/completions", CHAT) == 200


async def test_the_admin_key_is_not_an_api_key(house: House, http: aiohttp.ClientSession) -> None:
    async with house.post(http, "/v1/chat/completions", CHAT, key=ADMIN_KEY) as response:
        assert response.status == 401
