"""The routes as clients see them: the official client, errors, headers, bad input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes.scripts import stall
from tests.router.gateway.house import CHAT, COMPLETION, KEYS, House, chat_status, events
from tests.waiting import until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key=KEYS["alice"], max_retries=0, timeout=10
    ) as client:
        yield client


async def test_chat(house: House, client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=8
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert raw.headers["x-warmroute-replica"] in ("r0", "r1")
    assert house.services.brain.decisions.get(raw.headers["x-warmroute-decision"])
    await house.settled()


async def test_chat_stream_with_usage(house: House, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "one two three"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    await house.settled()


async def test_completions_of_text_and_tokens(house: House, client: AsyncOpenAI) -> None:
    text = await client.completions.create(model="tiny", prompt="hello", max_tokens=8)
    assert text.choices[0].text == "one two three"
    tokens = await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2)
    assert tokens.usage.prompt_tokens == 3
    assert tokens.choices[0].finish_reason == "length"


async def test_several_prompts_are_several_runs(house: House, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b", "c"], n=2, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert all(choice.text == "one two three" for choice in answer.choices)
    assert len(house.calls) == 3
    stream = await client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=8, stream=True
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {"one two three"}
    await house.settled()


async def test_P9_n_choices(house: House, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == house.calls[0].prompt_tokens


async def test_P10_logprobs(house: House, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=1, max_tokens=8
    )
    assert len(answer.choices[0].logprobs.content) == 3


async def test_P15_errors_are_the_clients_types(house: House, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "word " * 5_000}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["tiny"]


async def test_a_wrong_key_is_401(house: House, http: aiohttp.ClientSession) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        async with house.post(http, path, body, key="sk-wrong") as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with http.get(f"{house.url}/v1/models", headers={"Authorization": "x"}) as response:
        assert response.status == 401
    assert not house.calls


async def test_no_key_is_anonymous_only_where_allowed(build, http: aiohttp.ClientSession) -> None:
    closed = await build(allow_anonymous=False)
    async with closed.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 401
    opened = await build()
    async with opened.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    assert opened.calls[0].request.tenant == "anonymous"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/health", 405)],
)
async def test_unknown_routes_answer_in_openais_shape(
    house: House, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, f"{house.url}{path}") as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"1",
    b"\xff\xfe",
    b'{"model":"tiny"}',
    b'{"model":1,"messages":[],"prompt":"x"}',
    b'{"model":"tiny","messages":{},"prompt":{}}',
    b'{"model":"tiny","messages":[1],"prompt":[[]]}',
    b'{"model":"tiny","messages":[{"role":"user"}],"prompt":[]}',
    b'{"model":"tiny","messages":[{"role":"x","content":"y"}],"prompt":[-1]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","n":0}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","n":"1"}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","temperature":NaN}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","top_p":1e999}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","stop":[1]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}],"prompt":"\\ud800"}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","max_tokens":-1}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","bogus":1}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","stream":"yes"}',
    b'{"model":"tiny","messages":[{"role":"user","content":"y"}],"prompt":"y","stream_options":{}}',
    b'{"a":' * 5_000,
    b"[" * 100_000,
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_P11_malformed_bodies_then_a_good_request(
    house: House, http: aiohttp.ClientSession, path: str
) -> None:
    for body in BAD_BODIES:
        async with http.post(f"{house.url}{path}", data=body) as response:
            assert response.status == 400, body[:80]
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
    good = CHAT if "chat" in path else COMPLETION
    async with house.post(http, path, good) as response:
        assert response.status == 200
    assert len(house.calls) == 1


async def test_P11_no_content_type_is_needed(house: House, http: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "text/plain"}
    url = f"{house.url}/v1/chat/completions"
    async with http.post(url, data=json.dumps(CHAT), headers=headers) as response:
        assert response.status == 200


async def test_P16_two_requests_with_one_client_id(
    house: House, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    house.script(stall(release))
    headers = {"x-request-id": "mine-1"}
    url = f"{house.url}/v1/chat/completions"

    async def ask() -> tuple[str, str, str]:
        async with http.post(url, json=CHAT, headers=headers) as response:
            content = (await response.json())["choices"][0]["message"]["content"]
            return (
                content,
                response.headers["x-request-id"],
                response.headers["x-warmroute-request"],
            )

    tasks = [asyncio.create_task(ask()) for _ in range(2)]
    await until(lambda: len(house.calls) == 2)
    release.set()
    answers = await asyncio.gather(*tasks)
    assert {answer[0] for answer in answers} == {"one two three"}
    assert {answer[1] for answer in answers} == {"mine-1"}
    assert len({answer[2] for answer in answers}) == 2
    assert len({call.request.request_id for call in house.calls}) == 2


@pytest.mark.parametrize("given", ["bad id", "x" * 300, "ü"])
async def test_P16_an_odd_client_id_is_not_echoed(
    house: House, http: aiohttp.ClientSession, given: str
) -> None:
    headers = {"x-request-id": given}
    async with http.get(f"{house.url}/health", headers=headers) as response:
        assert response.headers["x-request-id"].startswith("req-")


async def test_P17_a_two_megabyte_delta_passes(house: House, http: aiohttp.ClientSession) -> None:
    async def huge(call):
        await call.send("y" * 2_000_000, finish="stop")

    house.script(huge)
    async with house.post(http, "/v1/chat/completions", {**CHAT, "stream": True}) as response:
        body = await response.read()
    assert body.count(b"y") >= 2_000_000
    assert events(body)[-1] == b"[DONE]"


@pytest.mark.parametrize(
    ("options", "usage_chunks"),
    [(None, 0), ({"include_usage": False}, 0), ({}, 0), ({"include_usage": True}, 1)],
)
async def test_P1_P2_usage_comes_once_and_only_when_asked(
    house: House, http: aiohttp.ClientSession, options: dict | None, usage_chunks: int
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        asked = {**body, "stream": True, "stream_options": options}
        async with house.post(http, path, asked) as response:
            got = events(await response.read())
        assert got[-1] == b"[DONE]"
        chunks = [json.loads(event) for event in got[:-1]]
        with_usage = [chunk for chunk in chunks if chunk.get("usage")]
        assert len(with_usage) == usage_chunks
        assert all(chunk["choices"] == [] for chunk in with_usage)
        assert with_usage == chunks[len(chunks) - usage_chunks :]


@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "bogus"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"functions": []},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
    ],
)
async def test_P12_P14_what_is_not_supported_is_400_and_never_ignored(
    house: House, http: aiohttp.ClientSession, change: dict
) -> None:
    async with house.post(http, "/v1/chat/completions", {**CHAT, **change}) as response:
        assert response.status == 400
    assert not house.calls


async def test_P14_developer_and_parts_give_the_same_prompt(
    house: House, http: aiohttp.ClientSession
) -> None:
    for role, content in (
        ("system", "be brief"),
        ("developer", [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]),
    ):
        messages = [{"role": role, "content": content}, *CHAT["messages"]]
        async with house.post(
            http, "/v1/chat/completions", {**CHAT, "messages": messages}
        ) as response:
            assert response.status == 200
    assert len({call.request.prompt for call in house.calls}) == 1


async def test_the_answer_is_rendered_with_its_own_ids_in_the_next_turn(
    house: House, http: aiohttp.ClientSession
) -> None:
    text = "hello there"
    ids = [house.card.tokenizer.encode(letter)[0] for letter in text]
    assert ids != house.card.tokenizer.encode(text)

    async def spelled(call):
        await call.send(text, ids, finish="stop")

    house.script(spelled)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    turn = {"role": "assistant", "content": text}
    messages = [*CHAT["messages"], turn, {"role": "user", "content": "go on"}]
    async with house.post(http, "/v1/chat/completions", {**CHAT, "messages": messages}) as response:
        assert response.status == 200
    asked = sorted((call.request for call in house.calls), key=lambda r: len(r.prompt))
    first, second = (request.token_ids().tolist() for request in asked)
    assert second[: len(first) + len(ids)] == first + ids


async def test_health_ready_metrics(build, http: aiohttp.ClientSession) -> None:
    house = await build(replicas=0)
    async with http.get(f"{house.url}/health") as response:
        assert response.status == 200
    async with http.get(f"{house.url}/ready") as response:
        assert response.status == 503
    replica = house.new_replica("r0")
    house.replicas.append(replica)
    await replica.__aenter__()
    replica.announce(house.fleet)
    await house.up(1)
    async with http.get(f"{house.url}/ready") as response:
        assert response.status == 200
    assert await chat_status(house, http) == 200
    async with http.get(f"{house.url}/metrics") as response:
        text = await response.text()
    for name in ("requests_total", "ttft_seconds", "index_bytes", "inflight_requests 0.0"):
        assert f"warmroute_{name}" in text


async def test_tcp_nodelay_is_set(house: House, http: aiohttp.ClientSession) -> None:
    """On connections that the gateway reads itself, and on those that the library does."""
    import socket

    def nodelay(connections: Collection) -> None:
        assert connections
        for connection in connections:
            plug = connection.transport.get_extra_info("socket")
            assert plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert await chat_status(house, http) == 200
    nodelay(house.gateway._door._express)
    async with http.get(f"{house.url}/health") as response:
        await response.read()
    nodelay(house.gateway._runner.server.connections)
