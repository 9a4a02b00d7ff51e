"""What goes wrong between gateway and replicas; what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from events.errors import CoreError
from router.openai.stream import DONE
from tests.fakes.scripts import die_in_stream, echo, refuse, silent, stall
from tests.router.gateway.house import (
    CHAT,
    COMPLETION,
    ENDPOINTS,
    KEYS,
    STREAM,
    House,
    distinct,
    events,
    status_of,
)
from tests.waiting import PATIENCE_S, until


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
    await asyncio.wait_for(drained, PATIENCE_S)


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
