"""Bodies, requests, tokens and connections are bounded, and who is beyond is told what helps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import aiohttp
import pytest
from openai import AsyncOpenAI

from events.errors import CoreError
from tests.fakes.scripts import Call, refuse, stall
from tests.router.gateway.house import CHAT, KEYS, House, chat_status
from tests.waiting import until


async def test_bodies_over_the_bound_are_413(build, http: aiohttp.ClientSession) -> None:
    house = await build(max_body_bytes=10_000)
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * 20_000}]}
    async with house.post(http, "/v1/chat/completions", body) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200


async def test_O3_a_full_gate_is_429_with_retry_after_and_the_client_succeeds(build) -> None:
    house = await build(max_inflight_tokens=300)
    release = asyncio.Event()
    house.script(stall(release))
    async with AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key=KEYS["alice"], max_retries=2, timeout=20
    ) as client:
        first = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=CHAT["messages"], max_tokens=200)
        )
        await until(lambda: len(house.calls) == 1)
        async with aiohttp.ClientSession() as http:
            body = {**CHAT, "max_tokens": 200}
            async with house.post(http, "/v1/chat/completions", body) as refused:
                assert refused.status == 429
                assert int(refused.headers["Retry-After"]) >= 1
        second = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=CHAT["messages"], max_tokens=200)
        )
        await asyncio.sleep(0.1)
        release.set()
        answers = await asyncio.gather(first, second)
    assert all(answer.choices[0].message.content == "one two three" for answer in answers)
    await house.settled()


async def test_O3_chats_without_max_tokens_do_not_fill_the_gate(
    build, http: aiohttp.ClientSession
) -> None:
    house = await build(max_inflight_tokens=4_000, expected_answer_tokens=100)
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send("words", ids=[1] * 150)
        await release.wait()
        await call.send(finish="stop")

    house.script(script)
    body = {"model": "tiny", "messages": CHAT["messages"]}

    async def ask(stream: bool) -> int:
        path, asked = "/v1/chat/completions", {**body, "stream": stream}
        async with house.post(http, path, asked) as response:
            await response.read()
            return response.status

    asking = [asyncio.create_task(ask(stream)) for stream in [True, False] * 5]
    await until(lambda: len(house.calls) == 10)
    held = 10 * (house.calls[0].prompt_tokens + 150)
    await until(lambda: house.services.gate.tokens == held)
    release.set()
    assert await asyncio.gather(*asking) == [200] * 10
    await house.settled()


async def test_O3_a_replicas_refusal_keeps_its_retry_after(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(
        refuse(CoreError(status=429, message="full", code="q", retry_after_s=3.2, reroute=True))
    )
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 429
        assert 4 <= int(response.headers["Retry-After"]) <= 6
    assert len(house.calls) == 2


async def test_too_many_requests_at_once_are_503(build, http: aiohttp.ClientSession) -> None:
    house = await build(max_connections=1)
    release = asyncio.Event()
    house.script(stall(release))
    first = asyncio.create_task(chat_status(house, http))
    await until(lambda: len(house.calls) == 1)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    async with http.get(f"{house.url}/health") as response:
        assert response.status == 200
    release.set()
    assert await first == 200


async def test_odd_bodies_are_refused_cleanly(house: House, http: aiohttp.ClientSession) -> None:
    url = f"{house.url}/v1/chat/completions"
    headers = {"Content-Encoding": "gzip"}
    async with http.post(url, data=b"not gzip at all", headers=headers) as response:
        assert response.status == 415
    reader, writer = await raw(house)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    writer.write(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert b" 400 " in answer.splitlines()[0]
    assert await chat_status(house, http) == 200
    await house.settled()


async def raw(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = house.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_R18_connections_are_bounded_and_idle_ones_are_closed(
    build, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.SPARE_CONNECTIONS", 3)
    house = await build(max_connections=2)
    door = house.gateway._door
    silent = [await raw(house) for _ in range(5)]
    silent[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\nHalf: a head")
    refused, writer = await raw(house)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    head, _, body = (await asyncio.wait_for(refused.read(), 5)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert 1 <= int(re.search(rb"Retry-After: (\d+)", head)[1]) <= 3
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    writer.close()
    door._idle_s = 0.0
    door.sweep()
    for reader, writer in silent:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    door._idle_s = 75.0
    assert await chat_status(house, http) == 200


async def test_a_busy_connection_is_not_idle(house: House, http: aiohttp.ClientSession) -> None:
    release = asyncio.Event()
    house.script(stall(release))
    asking = asyncio.create_task(chat_status(house, http))
    await until(lambda: len(house.calls) == 1)
    house.gateway._door._idle_s = 0.0
    house.gateway._door.sweep()
    release.set()
    assert await asking == 200
