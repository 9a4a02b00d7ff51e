"""What goes wrong between clients, gateway and replicas; what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from events.errors import CoreError
from router.openai.stream import DONE
from tests.fakes.replica import die_in_stream, echo, refuse, silent, stall
from tests.router.gateway.house import ADMIN_KEY, CHAT, COMPLETION, KEYS, House, events
from tests.waiting import until

STREAM = {**CHAT, "stream": True}
ENDPOINTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", STREAM),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "stream": True}),
]


async def status_of(house: House, http: aiohttp.ClientSession, path: str, body: dict) -> int:
    async with house.post(http, path, body) as response:
        await response.read()
        return response.status


def distinct(path: str, body: dict, number: int) -> dict:
    text = f"{number} is the number of this prompt"
    if "chat" in path:
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": text}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_R1_a_burst_spreads_over_stalled_engines(
    build, http: aiohttp.ClientSession, path: str, body: dict
) -> None:
    house = await build(replicas=4)
    release = asyncio.Event()
    house.script(stall(release))
    tasks = [
        asyncio.create_task(status_of(house, http, path, distinct(path, body, number)))
        for number in range(32)
    ]
    await until(lambda: len(house.calls) == 32)
    counts = [len(replica.calls) for replica in house.replicas]
    assert all(6 <= count <= 10 for count in counts), counts
    release.set()
    assert await asyncio.gather(*tasks) == [200] * 32
    await house.settled()


async def test_R10_no_replica_is_503_and_its_return_is_noticed(
    house: House, http: aiohttp.ClientSession
) -> None:
    for replica in house.replicas:
        await replica.die()
    await house.up(0)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "no_replica"
    for replica in house.replicas:
        replica.boot += 1
        await replica.__aenter__()
        replica.announce(house.fleet)
    await house.up(2)
    assert await status_of(house, http, "/v1/chat/completions", CHAT) == 200


async def test_R11_too_long_prompts_open_no_breaker(
    house: House, http: aiohttp.ClientSession
) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "word " * 5_000}]}
    for _ in range(20):
        assert await status_of(house, http, "/v1/chat/completions", long) == 400
    house.script(refuse(CoreError(status=400, message="no", code="context_length_exceeded")))
    for _ in range(20):
        assert await status_of(house, http, "/v1/chat/completions", CHAT) == 400
    house.script(echo)
    assert await status_of(house, http, "/v1/chat/completions", CHAT) == 200
    assert {view.breaker for view in house.fleet.replicas()} == {"closed"}


async def test_R15_a_broken_stream_is_counted_and_gives_no_credit(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(die_in_stream)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        decision_id = response.headers["x-warmroute-decision"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    record = house.services.brain.decisions.get(decision_id)
    assert record.outcome.status == "transport"
    metrics = house.services.metrics.text().decode()
    assert 'warmroute_stream_errors_total{cause="transport"} 1.0' in metrics
    assert 'warmroute_attempts_total{status="transport"} 2.0' in metrics
    assert "warmroute_continuations_total 1.0" in metrics
    await house.settled()


async def test_R16_R17_after_the_first_byte_nothing_twice_and_no_clean_end(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(die_in_stream)
    received = b""
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                received += part
    documents = [json.loads(event) for event in events(received)]
    assert "error" in documents[-1]
    text = "".join(d["choices"][0]["delta"].get("content", "") for d in documents[:-1])
    assert text == "one two"
    assert all(d["choices"][0]["finish_reason"] is None for d in documents[:-1])
    assert DONE not in received
    assert sorted(call.continuing for call in house.calls) == [False, True]


async def test_R17_the_official_client_sees_an_error(house: House) -> None:
    house.script(die_in_stream)
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEYS["bob"]) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], max_tokens=8, stream=True
        )
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None


async def test_R17_an_error_delta_mid_stream_is_an_error_event(
    house: House, http: aiohttp.ClientSession
) -> None:
    seen = asyncio.Event()

    async def fail(call):
        await call.send("one")
        await seen.wait()
        await call.refuse(CoreError(status=500, message="engine lost", type="server_error"))

    house.script(fail)
    received = b""
    async with house.post(http, "/v1/completions", {**COMPLETION, "stream": True}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                received += part
                seen.set()
    assert json.loads(events(received)[-1])["error"]["message"] == "engine lost"
    assert DONE not in received


async def test_R16_a_break_before_the_first_byte_is_retried_unseen(
    house: House, http: aiohttp.ClientSession
) -> None:
    async def die_once(call):
        house.script(echo)
        call.replica.break_links()

    house.script(die_once)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        body = await response.read()
    assert body.endswith(DONE)
    assert {call.request.attempt for call in house.calls} == {1, 2}
    assert len({call.replica for call in house.calls}) == 2
    await house.settled()


async def open_streams(house: House, count: int) -> None:
    """Open many streams at once, see them flow, finish them all."""
    release = asyncio.Event()

    async def slow(call):
        await call.send("one")
        await release.wait()
        await call.send(" two", finish="stop")

    house.script(slow)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one() -> bytes:
            async with house.post(http, "/v1/chat/completions", STREAM) as response:
                assert response.status == 200
                return await response.read()

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        await until(lambda: len(house.calls) == count)
        async with http.get(f"{house.url}/health") as response:
            assert response.status == 200
        release.set()
        bodies = await asyncio.gather(*tasks)
    assert all(body.endswith(DONE) for body in bodies)
    await house.settled()


async def test_R18_many_streams(build) -> None:
    await open_streams(await build(), 150)


@pytest.mark.slow
async def test_R18_fifteen_hundred_streams(build) -> None:
    await open_streams(await build(replicas=3, max_inflight_tokens=10_000_000), 1_500)


async def test_R18_what_is_over_the_bound_is_refused(build, http: aiohttp.ClientSession) -> None:
    house = await build(max_connections=20)
    release = asyncio.Event()
    house.script(stall(release))
    tasks = [
        asyncio.create_task(status_of(house, http, "/v1/chat/completions", STREAM))
        for _ in range(30)
    ]
    await until(lambda: sum(task.done() for task in tasks) == 10)
    release.set()
    statuses = await asyncio.gather(*tasks)
    assert sorted(statuses) == [200] * 20 + [503] * 10
    await house.settled()


async def test_R20_a_draining_replica_gets_no_new_turn_and_finishes_its_stream(
    house: House, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()

    async def slow(call):
        await call.send("one")
        await release.wait()
        await call.send(" two", finish="stop")

    house.script(slow)
    # Long enough that its warm prefix would outweigh the stream that runs there.
    session = {**STREAM, "messages": [{"role": "user", "content": "what was said before " * 30}]}
    async with house.post(http, "/v1/chat/completions", session) as response:
        draining = next(r for r in house.replicas if r.calls)
        house.script(echo)
        assert await status_of(house, http, "/v1/chat/completions", session) == 200
        assert len(draining.calls) == 2
        draining.draining = True
        house.fleet.on_load(draining.replica_id, draining.boot, draining.load())
        for _ in range(4):
            assert await status_of(house, http, "/v1/chat/completions", session) == 200
        assert len(draining.calls) == 2
        house.fleet.on_gone(draining.replica_id, draining.boot, "bye")
        release.set()
        assert (await response.read()).endswith(DONE)


async def test_R20_the_gateway_drains(house: House, http: aiohttp.ClientSession) -> None:
    release = asyncio.Event()

    async def slow(call):
        await call.send("one")
        await release.wait()
        await call.send(" two", finish="stop")

    house.script(slow)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        drained = asyncio.create_task(house.gateway.drain())
        await asyncio.sleep(0)
        async with http.get(f"{house.url}/ready") as ready:
            assert ready.status == 503
        async with house.post(http, "/v1/chat/completions", CHAT) as refused:
            assert refused.status == 503
            assert "Retry-After" in refused.headers
        assert not drained.done()
        release.set()
        assert (await response.read()).endswith(DONE)
    await asyncio.wait_for(drained, 5)


def raw_request(house: House, path: str, body: dict) -> socket.socket:
    """A request over a bare socket, so that it can be closed in any way."""
    host, port = house.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize("leave", ["close", "half_close", "reset"])
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_O1_clients_that_leave_are_cancelled_upstream(build, leave: str, body: dict) -> None:
    house = await build()
    house.script(silent)
    count = 200 if leave == "close" else 50
    clients = [raw_request(house, "/v1/chat/completions", body) for _ in range(count)]
    await until(lambda: len(house.calls) == count)
    for client in clients:
        if leave == "half_close":
            client.shutdown(socket.SHUT_WR)
        else:
            if leave == "reset":
                linger = b"\x01\0\0\0\0\0\0\0"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.close()
    await until(house.idle)
    assert all(call.aborted.is_set() for call in house.calls)
    for client in clients:
        client.close()


async def test_O1_leaving_in_mid_stream_aborts(house: House, http: aiohttp.ClientSession) -> None:
    async def endless(call):
        while not call.aborted.is_set():
            await call.send("x")
            await asyncio.sleep(0.01)

    house.script(endless)
    response = await house.post(http, "/v1/chat/completions", STREAM)
    await response.content.readany()
    response.close()
    await until(house.idle)
    assert house.calls[0].aborted.is_set()


async def test_O1_leaving_while_sending_the_body(house: House) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
    await until(lambda: house.services.gate.requests == 1)
    client.close()
    await until(house.idle)


async def test_O5_a_client_that_does_not_read_is_held_then_dropped(build) -> None:
    house = await build(slow_reader_s=0.3, stream_buffer_bytes=65_536)

    async def flood(call):
        while not call.aborted.is_set():
            await call.send("x" * 10_000)
            if call.held.is_set() and not call.resumed.is_set():
                await asyncio.sleep(0.01)

    house.script(flood)
    client = raw_request(house, "/v1/chat/completions", {**STREAM, "max_tokens": 1_000})
    await until(lambda: len(house.calls) == 1)
    await until(lambda: house.calls[0].aborted.is_set())
    await until(house.idle)
    client.close()
    outcome = house.services.brain.decisions.latest(1)[0].outcome
    assert outcome.status == "client_gone"


async def test_O5_an_idle_stream_gets_keep_alive_comments(
    build, http: aiohttp.ClientSession
) -> None:
    house = await build(keepalive_s=0.05)
    release = asyncio.Event()

    async def pausing(call):
        await release.wait()
        await call.answer()

    house.script(pausing)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        release.set()
        assert (await response.read()).endswith(DONE)


async def test_O7_gauges_return_to_zero_after_chaos(build, http: aiohttp.ClientSession) -> None:
    house = await build(replicas=3)
    scripts = [echo, silent, die_in_stream, refuse(CoreError(status=500, message="x"))]
    number = 0

    async def mixed(call):
        nonlocal number
        number += 1
        await scripts[number % 4](call)

    house.script(mixed)

    async def one(index: int) -> None:
        path, body = ENDPOINTS[index % 4]
        try:
            async with asyncio.timeout(0.5):
                await status_of(house, http, path, body)
        except (TimeoutError, aiohttp.ClientError):
            pass

    await asyncio.gather(*(one(index) for index in range(60)))
    await house.settled()
    text = house.services.metrics.text().decode()
    for gauge in ("requests", "tokens", "attempts"):
        assert f"warmroute_inflight_{gauge} 0.0" in text


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


async def test_E9_requests_go_on_while_the_bus_is_away(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.bus.disconnect()
    for replica in house.replicas:
        replica.quiet()
    for _ in range(3):
        assert await status_of(house, http, "/v1/chat/completions", CHAT) == 200
    house.bus.reconnect()
    assert await status_of(house, http, "/v1/chat/completions", CHAT) == 200


async def test_the_admin_key_is_not_an_api_key(house: House, http: aiohttp.ClientSession) -> None:
    async with house.post(http, "/v1/chat/completions", CHAT, key=ADMIN_KEY) as response:
        assert response.status == 401
