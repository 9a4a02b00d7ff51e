"""Servers of other kinds behind the real gateway: bytes through, faults shown, nothing held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest
from openai import AsyncOpenAI

from configs.model.card import ModelCard
from router.tenancy.tenants import scope_tag
from tests.fakes.openai_server import Asked, answer, piece, refuse, silent
from tests.fakes.replica import die_in_stream
from tests.router.backends.house import ForeignHouse
from tests.router.gateway.house import CHAT, COMPLETION, KEYS, SECRET, events
from tests.router.gateway.test_faults import ENDPOINTS, distinct
from tests.waiting import until

STREAM = {**CHAT, "stream": True}
LONG = {**STREAM, "messages": [{"role": "user", "content": "a long prompt " * 20}]}
PATH = "/v1/chat/completions"


async def read(house: ForeignHouse, http: aiohttp.ClientSession, body: dict, path: str = PATH):
    async with house.post(http, path, body) as response:
        return response, await response.read()


async def broken(house: ForeignHouse, http: aiohttp.ClientSession) -> tuple[str, bytes]:
    """(decision, what came) of a stream that has to break."""
    received = b""
    async with house.post(http, PATH, LONG) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                received += part
        return response.headers["x-warmroute-decision"], received


async def test_answers_are_the_servers_bytes(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    response, body = await read(house, http, {**LONG, "stream": False})
    assert response.status == 200
    assert json.loads(body)["id"] == "f"
    assert len(house.services.brain.optimistic) > 0
    assert response.headers["x-warmroute-replica"] == "f0"
    outcome = house.outcome(response.headers["x-warmroute-decision"])
    assert (outcome.status, outcome.cached_tokens, outcome.completion_tokens) == ("ok", 32, 3)
    assert outcome.ttft_ms is None
    await house.settled()


async def test_a_plain_answer_is_no_prefill_for_all_its_time(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    go = asyncio.Event()

    async def script(asked: Asked) -> None:
        await asyncio.wait_for(go.wait(), 10)
        await answer(asked)

    house.tell(script)
    asking = asyncio.create_task(read(house, http, CHAT))
    await until(lambda: len(house.asked) == 1)
    booked = house.services.brain.ledger.booked("f0")
    await until(lambda: (booked.requests, booked.prefilling) == (1, 0))
    go.set()
    await asking
    await house.settled()
    assert house.services.backends.seats["f0"].rates.prefill.confidence == 0


async def test_the_body_goes_up_with_another_model_and_nothing_else_changed(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    body = (
        b'{"temperature": 0.50, "model":"tiny","messages":[ {"role":"user", "content":"\\u00e9"}]}'
    )
    async with http.post(house.url + PATH, data=body) as response:
        assert response.status == 200
    (asked,) = house.asked
    assert b'"temperature":0.50' in asked.raw
    assert b'[ {"role":"user", "content":"\\u00e9"}]' in asked.raw
    assert asked.body["model"] == "up"
    assert asked.path == PATH
    assert "authorization" not in asked.headers


async def test_S2_the_salt_upstream_is_the_tenants_and_not_the_clients(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    for key in (*KEYS.values(), KEYS["alice"], None):
        async with house.post(http, PATH, CHAT, key) as response:
            assert response.status == 200
    salts = [asked.body["cache_salt"] for asked in house.asked]
    assert len(set(salts)) == 3
    assert salts[0] == salts[2] == scope_tag(bytes.fromhex(SECRET), "alice", "private")
    response, _ = await read(house, http, {**CHAT, "cache_salt": salts[0]})
    assert response.status == 400
    assert len(house.asked) == 4


async def test_without_cache_salt_none_is_sent(build: Callable, http) -> None:
    house = await build(changes={"cache_salt": False})
    await read(house, http, CHAT)
    assert "cache_salt" not in house.asked[0].body


async def test_P3_the_usage_event_passes_where_asked_for_and_is_taken_out_where_not(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    wanted = {**STREAM, "stream_options": {"include_usage": True}}
    _, with_usage = await read(house, http, wanted)
    response, without = await read(house, http, STREAM)
    assert len(events(with_usage)) == len(events(without)) + 1
    assert json.loads(events(with_usage)[-2])["choices"] == []
    assert b"usage" not in without
    assert events(without)[-1] == b"[DONE]"
    assert house.outcome(response.headers["x-warmroute-decision"]).cached_tokens == 32
    assert [asked.body["stream_options"] for asked in house.asked] == [{"include_usage": True}] * 2


async def test_P3_P17_one_line_of_two_megabytes_passes(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    async def script(asked: Asked) -> None:
        await asked.head()
        await asked.event(piece("x" * 2_000_000))
        await asked.event({"choices": [], "prompt_filter_results": []})
        await asked.event(piece("", "stop"))
        await asked.done()

    house.tell(script)
    _, body = await read(house, http, STREAM)
    told = events(body)
    assert len(told) == 4
    assert json.loads(told[0])["choices"][0]["delta"]["content"] == "x" * 2_000_000
    assert json.loads(told[1])["choices"] == []
    await house.settled()


async def test_an_openai_client_works(house: ForeignHouse) -> None:
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEYS["alice"]) as client:
        stream = await client.chat.completions.create(**STREAM)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "one two three"


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


async def test_R17_garbage_in_a_stream_is_passed_on_and_its_end_is_not_made_up(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    async def script(asked: Asked) -> None:
        await asked.head()
        await asked.chunk(b"data: {not json\n\n")
        asked.cut()

    house.tell(script)
    _, received = await broken(house, http)
    assert b"[DONE]" not in received
    assert b"finish_reason" not in received


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


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_R1_a_burst_spreads_over_stalled_servers(
    build: Callable, http: aiohttp.ClientSession, path: str, body: dict
) -> None:
    house = await build(servers=4)
    release = asyncio.Event()

    async def stalled(asked: Asked) -> None:
        await release.wait()
        await answer(asked)

    house.tell(stalled)
    asking = [
        asyncio.create_task(read(house, http, distinct(path, body, number), path))
        for number in range(32)
    ]
    await until(lambda: len(house.asked) == 32)
    counts = [len(server.asked) for server in house.servers]
    assert all(6 <= count <= 10 for count in counts), counts
    release.set()
    assert {response.status for response, _ in await asyncio.gather(*asking)} == {200}
    await house.settled()


async def test_before_the_first_byte_another_backend_is_asked(build: Callable, http) -> None:
    house = await build(servers=2)

    async def first_breaks(asked: Asked) -> None:
        if len(house.asked) == 1:
            await asked.head()
            asked.cut()
        else:
            await answer(asked)

    house.tell(first_breaks)
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

    async def first_breaks(asked: Asked) -> None:
        if len(house.asked) == 1:
            await asked.head()
            await asked.chunk(b'data: {"choices": [{"del')
            asked.cut()
        else:
            await answer(asked)

    house.tell(first_breaks)
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


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (422, 422), (413, 413)])
async def test_R11_a_callers_mistake_is_passed_on_and_opens_no_breaker(
    house: ForeignHouse, http, status: int, seen: int
) -> None:
    house.tell(refuse(status))
    for _ in range(5):
        response, body = await read(house, http, STREAM)
        assert response.status == seen
        assert json.loads(body)["error"]["message"] == "no"
    assert house.fleet.member("f0").breaker.failures == 0
    await house.settled()


@pytest.mark.parametrize(
    ("status", "seen", "faults"),
    [(401, 502, 0), (404, 502, 0), (429, 503, 0), (500, 502, 1), (503, 503, 1), (307, 502, 1)],
)
async def test_what_is_no_callers_mistake_is_not_blamed_on_him(
    house: ForeignHouse, http, status: int, seen: int, faults: int
) -> None:
    house.tell(refuse(status))
    response, body = await read(house, http, CHAT)
    assert response.status == seen
    assert json.loads(body)["error"]["type"] == "server_error"
    assert house.fleet.member("f0").breaker.failures == faults


async def test_when_to_come_again_is_the_servers_to_say(house: ForeignHouse, http) -> None:
    async def script(asked: Asked) -> None:
        await asked.plain(429, {}, Retry_After="7")

    house.tell(script)
    response, _ = await read(house, http, CHAT)
    assert (response.status, response.headers["Retry-After"]) == (503, "7")


async def test_S3_redirects_are_not_followed(build: Callable, http) -> None:
    house = await build(servers=2)
    lure = house.servers[1]

    async def redirect(asked: Asked) -> None:
        await asked.plain(307, {}, Location=lure.url + asked.path)

    house.servers[0].script = redirect
    await read(house, http, CHAT)
    assert len(lure.asked) <= 1
    assert all("host" in a.headers and str(lure.port) in a.headers["host"] for a in lure.asked)


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


async def test_an_idle_stream_is_kept_alive_between_events_only(build: Callable, http) -> None:
    house = await build(keepalive_s=0.05)
    go = asyncio.Event()

    async def script(asked: Asked) -> None:
        await asked.head()
        await asyncio.wait_for(go.wait(), 5)
        await answer_rest(asked)

    async def answer_rest(asked: Asked) -> None:
        await asked.event(piece("one", "stop"))
        await asked.done()

    house.tell(script)
    async with house.post(http, PATH, STREAM) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        go.set()
        body = await response.read()
    assert events(body)[-1] == b"[DONE]"


async def test_several_prompts_go_to_replicas_or_whole_to_a_backend(build: Callable, http) -> None:
    several = {**COMPLETION, "prompt": ["a", "b", "c"]}
    mixed = await build(servers=1, replicas=1)
    response, _ = await read(mixed, http, several, "/v1/completions")
    assert response.status == 200
    assert (len(mixed.calls), len(mixed.asked)) == (3, 0)
    foreign = await build(servers=1)
    response, _ = await read(foreign, http, several, "/v1/completions")
    assert response.status == 200
    assert [asked.body["prompt"] for asked in foreign.asked] == [["a", "b", "c"]]
    await foreign.settled()


@pytest.mark.parametrize("structured", [False, True])
async def test_P12_a_form_goes_to_servers_that_enforce_it(
    tiny_card: ModelCard, http: aiohttp.ClientSession, structured: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {**CHAT, "response_format": form}
    async with ForeignHouse(tiny_card, 1, changes={"structured": structured}) as house:
        response, _ = await read(house, http, body)
        assert response.status == (200 if structured else 400)
        assert [asked.body["response_format"] for asked in house.asked] == [form] * structured
