"""Servers of other kinds that fail, break off, refuse or are waited for: what the client sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from tests.fakes.openai_server import Asked, answer, piece, silent
from tests.fakes.scripts import die_in_stream
from tests.router.backends.house import PATH, ForeignHouse, read
from tests.router.gateway.house import CHAT, STREAM, events
from tests.waiting import until

LONG = {**STREAM, "messages": [{"role": "user", "content": "a long prompt " * 20}]}


async def broken(house: ForeignHouse, http: aiohttp.ClientSession) -> tuple[str, bytes]:
    """(decision, what came) of a stream that has to break."""
    received = b""
    async with house.post(http, PATH, LONG) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                received += part
        return response.headers["x-warmroute-decision"], received


def first_breaks(
    house: ForeignHouse, sent: bytes = b"", whole: bool = False
) -> Callable[[Asked], Awaitable[None]]:
    """The first that is asked sends so much, then breaks off, or ends; the next one answers."""

    async def script(asked: Asked) -> None:
        if len(house.asked) > 1:
            await answer(asked)
            return
        await asked.head()
        if sent:
            await asked.chunk(sent)
        if whole:
            await asked.done()
        else:
            asked.cut()

    return script


@pytest.mark.parametrize("end", ["cut", "end", "no_done"])
async def test_R15_R17_a_broken_stream_stays_broken(
    house: ForeignHouse, http: aiohttp.ClientSession, end: str
) -> None:
    async def script(asked: Asked) -> None:
        await asked.head()
        await asked.event(piece("one"))
        if end == "no_done":
            await asked.event(piece("", "stop"))
        if end == "cut":
            asked.cut()
        else:
            await asked.end()

    house.tell(script)
    decision, received = await broken(house, http)
    assert b"[DONE]" not in received
    assert "error" in json.loads(events(received)[-1])
    assert house.outcome(decision).status == "transport"
    metrics = house.services.metrics.text().decode()
    assert 'warmroute_stream_errors_total{cause="transport"} 1.0' in metrics
    assert len(house.services.brain.optimistic) == 0
    assert house.fleet.member("f0").breaker.failures == 1
    await house.settled()


UNREADABLE = [b"{not json", b"[1]", b"", b'{"id": "\xff"}', b'{"choices":\ndata: [DONE]']


@pytest.mark.parametrize("data", UNREADABLE)
@pytest.mark.parametrize("end", ["cut", "clean"])
async def test_R17_an_event_that_is_not_json_is_an_error_and_no_clean_end(
    house: ForeignHouse, http: aiohttp.ClientSession, data: bytes, end: str
) -> None:
    good = piece("one")

    async def script(asked: Asked) -> None:
        await asked.head()
        await asked.event(good)
        await asked.chunk(b"data: " + data + b"\n\n")
        if end == "cut":
            asked.cut()
        else:
            await asked.event(piece("", "stop"))
            await asked.done()

    house.tell(script)
    decision, received = await broken(house, http)
    told = events(received)
    assert [json.loads(event) for event in told[:-1]] == [good]
    assert json.loads(told[-1])["error"]["code"] == "backend_error"
    assert house.outcome(decision).status == "error"
    assert house.fleet.member("f0").breaker.failures == 1
    metrics = house.services.metrics.text().decode()
    assert 'warmroute_stream_errors_total{cause="error"} 1.0' in metrics
    await house.settled()


async def test_R17_where_nothing_was_sent_yet_a_broken_event_is_asked_again_elsewhere(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(servers=2)

    house.tell(first_breaks(house, b"data: {not json\n\n", whole=True))
    response, body = await read(house, http, STREAM)
    assert response.status == 200
    assert events(body)[-1] == b"[DONE]"
    assert len(house.asked) == 2
    await house.settled()


async def test_R17_an_error_that_the_server_tells_in_its_stream_is_counted(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    async def script(asked: Asked) -> None:
        await asked.head()
        await asked.event(piece("one"))
        await asked.event({"error": {"message": "out of memory"}})
        await asked.done()

    house.tell(script)
    response, received = await read(house, http, STREAM)
    assert b'finish_reason":"' not in received
    assert house.outcome(response.headers["x-warmroute-decision"]).status == "error"
    metrics = house.services.metrics.text().decode()
    assert 'warmroute_stream_errors_total{cause="error"} 1.0' in metrics
    assert len(house.services.brain.optimistic) == 0
    await house.settled()


async def test_R17_a_plain_answer_cut_short_is_no_answer(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    async def script(asked: Asked) -> None:
        await asked.head(kind="application/json")
        await asked.chunk(b'{"id": "f", ')
        asked.cut()

    house.tell(script)
    async with house.post(http, PATH, CHAT) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await house.settled()


@pytest.mark.parametrize("more", ["", "x" * 40_000])
async def test_R17_where_no_length_is_told_a_cut_behind_a_brace_is_no_end(
    house: ForeignHouse, http: aiohttp.ClientSession, more: str
) -> None:
    text = json.dumps({"id": more, "choices": [], "usage": {"prompt_tokens": 1}})[:-1]

    async def script(asked: Asked) -> None:
        head = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        asked._writer.write(head + text.encode())
        await asked._writer.drain()
        asked._writer.close()

    house.tell(script)
    async with house.post(http, PATH, CHAT) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    text += "}"
    response, body = await read(house, http, CHAT)
    assert (response.status, body.decode()) == (200, text)
    await house.settled()


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_more_cached_than_the_prompt_is_not_counted_and_has_a_name(
    house: ForeignHouse, http: aiohttp.ClientSession, body: dict
) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {}}
    usage["prompt_tokens_details"]["cached_tokens"] = 1_000_000

    async def script(asked: Asked) -> None:
        if not asked.body.get("stream"):
            await asked.plain(200, {**piece("one", "stop"), "usage": usage})
            return
        await asked.head()
        await asked.event(piece("one", "stop"))
        await asked.event({"choices": [], "usage": usage})
        await asked.done()

    house.tell(script)
    response, _ = await read(house, http, body)
    await house.settled()
    outcome = house.outcome(response.headers["x-warmroute-decision"])
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (9, 9)
    assert "warmroute_cached_tokens_total 9.0" in house.services.metrics.text().decode()
    assert house.fleet.alarms.active("impossible_usage", "f0")


async def test_before_the_first_byte_another_backend_is_asked(build: Callable, http) -> None:
    house = await build(servers=2)

    house.tell(first_breaks(house))
    response, body = await read(house, http, STREAM)
    assert response.status == 200
    assert events(body)[-1] == b"[DONE]"
    assert len(house.asked) == 2
    assert {len(server.asked) for server in house.servers} == {1}
    await house.settled()


async def test_bytes_that_did_not_reach_the_client_yet_are_no_first_byte(
    build: Callable, http
) -> None:
    house = await build(servers=2)

    house.tell(first_breaks(house, b'data: {"choices": [{"del'))
    response, body = await read(house, http, STREAM)
    assert response.status == 200
    assert len(events(body)) == 5
    assert len(house.asked) == 2


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_failover_crosses_kinds_both_ways(build: Callable, http, body: dict) -> None:
    house = await build(servers=1, replicas=1)
    assert len(house.fleet.pools()) == 1

    async def cut(asked: Asked) -> None:
        asked.cut()

    async def dead(call) -> None:
        call.replica.break_links()

    house.tell(cut)
    for _ in range(3):
        response, _ = await read(house, http, body)
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "r0")
    house.tell(answer)
    house.script(dead)
    for _ in range(3):
        response, _ = await read(house, http, body)
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "f0")
    assert house.asked
    assert house.calls
    await house.settled()


async def test_after_the_first_byte_of_a_replica_no_backend_answers(build: Callable, http) -> None:
    house = await build(servers=1, replicas=1)
    house.fleet.link_state("f0", house.fleet.member("f0").boot, False)
    house.script(die_in_stream)
    _, received = await broken(house, http)
    assert not house.asked
    assert b"one" in received


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_O1_a_client_that_leaves_ends_the_request_upstream(
    house: ForeignHouse, http, body: dict
) -> None:
    house.tell(silent)
    asking = asyncio.create_task(read(house, http, body))
    await until(lambda: len(house.asked) == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(house.asked[0].gone.wait(), 5)
    await house.settled()


async def test_O5_a_slow_reader_holds_the_server_back_and_is_cut(build: Callable) -> None:
    house = await build(slow_reader_s=0.3)
    sent = 0

    async def flood(asked: Asked) -> None:
        nonlocal sent
        await asked.head()
        while True:
            await asked.event(piece("x" * 50_000))
            sent += 50_000

    house.tell(flood)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rsplit(":")[-1]))
    body = json.dumps(STREAM).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    await until(lambda: len(house.asked) == 1)
    await house.settled()
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    del reader
    assert sent < 32_000_000


async def test_a_stale_connection_costs_nothing(house: ForeignHouse, http) -> None:
    server = house.servers[0]
    await read(house, http, CHAT)
    server.close_idle_after = 1
    for _ in range(3):
        response, _ = await read(house, http, CHAT)
        assert response.status == 200
    assert house.fleet.member("f0").breaker.failures == 0
    assert len(server.asked) == 4


async def test_a_silent_server_is_a_timeout(build: Callable, http) -> None:
    house = await build(first_token_timeout_s=0.2)
    house.tell(silent)
    response, _ = await read(house, http, STREAM)
    assert response.status == 504
    assert house.fleet.member("f0").breaker.failures == 1
    await house.settled()
