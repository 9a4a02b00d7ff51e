"""Servers of other kinds behind the real gateway: bytes through, both ways, nothing held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest
from openai import AsyncOpenAI

from configs.model.card import ModelCard
from router.tenancy.tenants import scope_tag
from tests.fakes.openai_server import Asked, answer, piece
from tests.fakes.scripts import stall
from tests.router.backends.house import PATH, ForeignHouse, read
from tests.router.gateway.house import (
    CHAT,
    COMPLETION,
    ENDPOINTS,
    KEYS,
    SECRET,
    STREAM,
    distinct,
    events,
)
from tests.waiting import until

LONG = {**CHAT, "messages": [{"role": "user", "content": "a long prompt " * 20}]}


async def test_answers_are_the_servers_bytes(
    house: ForeignHouse, http: aiohttp.ClientSession
) -> None:
    response, body = await read(house, http, LONG)
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
    async with http.get(house.url + "/router/replicas") as response:
        (shown,) = (await response.json())["replicas"]
    assert (shown["replica"], shown["link"], shown["in_flight"]) == ("f0", "up", 1)
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


async def test_R1_a_stalled_server_does_not_look_idle_beside_stalled_replicas(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(servers=2, replicas=2)
    release = asyncio.Event()

    async def stalled(asked: Asked) -> None:
        await release.wait()
        await answer(asked)

    house.tell(stalled)
    house.script(stall(release))
    booked, asking = house.services.brain.ledger.booked, []
    for number in range(1, 33):
        asking.append(asyncio.create_task(read(house, http, distinct(PATH, CHAT, number))))
        await until(lambda: len(house.asked) + len(house.calls) == number)  # noqa: B023
        # By all that was predicted their prefills are over.
        await until(lambda: booked("f0").prefilling + booked("f1").prefilling == 0)
    counts = [len(of.asked) for of in house.servers] + [len(of.calls) for of in house.replicas]
    assert all(6 <= count <= 10 for count in counts), counts
    release.set()
    assert {response.status for response, _ in await asyncio.gather(*asking)} == {200}
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
