"""Forms of answers go only where they are enforced."""

from __future__ import annotations

import json
from collections.abc import Callable

import aiohttp

from events.grammar import JSON_SCHEMA
from tests.fakes.scripts import Call
from tests.router.gateway.house import CHAT, House, events
from tests.router.gateway.test_admin import call

TOOL = {"type": "function", "function": {"name": "look"}}
JSON = {"response_format": {"type": "json_object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "<y>"}}\n</tool_call>'


async def test_P12_only_replicas_with_the_ability_are_asked(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(1)
    plain = house.new_replica("plain", abilities=())
    async with plain:
        plain.announce(house.fleet)
        await house.up(2)
        for _ in range(6):
            async with house.post(http, "/v1/chat/completions", {**CHAT, **JSON}) as response:
                assert response.status == 200
        assert not plain.calls
        asked = {"messages": CHAT["messages"], "max_tokens": 8}
        _, verdict = await call(house, http, "POST", "/router/explain", {**asked, **JSON})
        assert verdict["replica"] == "r0"
        assert {call.request.sampling.grammar.kind for call in house.calls} == {JSON_SCHEMA}


async def test_P12_without_such_a_replica_it_is_400(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(0)
    plain = house.new_replica("plain", abilities=())
    async with plain:
        plain.announce(house.fleet)
        await house.up(1)
        for fields in (JSON, {"tools": [TOOL], "tool_choice": "required"}):
            async with house.post(http, "/v1/chat/completions", {**CHAT, **fields}) as response:
                assert response.status == 400
                error = (await response.json())["error"]
            assert error["code"] == "unsupported_value"
        async with house.post(http, "/v1/chat/completions", {**CHAT, "tools": [TOOL]}) as response:
            assert response.status == 200
        async with http.get(f"{house.url}/openapi.json") as response:
            document = json.dumps(await response.json())
        assert "structured_outputs" not in document
        assert len(plain.calls) == 1


async def _say(call: Call) -> None:
    """Text, then a call, cut at odd places."""
    text = f"Let me see. {CALL}"
    for start in range(0, len(text), 7):
        await call.send(text[start : start + 7])
    await call.send(finish="stop")


async def test_P7_calls_in_a_stream_and_in_a_body(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(_say)
    body = {**CHAT, "tools": [TOOL]}
    async with house.post(http, "/v1/chat/completions", body) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"x": "<y>"}'}
    async with house.post(http, "/v1/chat/completions", {**body, "stream": True}) as response:
        *lines, done = events(await response.read())
    assert done == b"[DONE]"
    chunks = [json.loads(line) for line in lines]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"] == {"name": "look", "arguments": ""}
    assert all(set(more) == {"index", "function"} for more in calls[1:])
    joined = "".join(more["function"]["arguments"] for more in calls)
    assert json.loads(joined) == {"x": "<y>"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_P7_a_call_that_a_stop_string_cuts_is_not_to_be_carried_out(
    house: House, http: aiohttp.ClientSession
) -> None:
    async def cut(call: Call) -> None:
        await call.send(CALL[: CALL.index("<y>")], finish="stop")

    house.script(cut)
    body = {**CHAT, "tools": [TOOL], "stop": ["<y>"]}
    async with house.post(http, "/v1/chat/completions", body) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["finish_reason"] == "stop"
    async with house.post(http, "/v1/chat/completions", {**body, "stream": True}) as response:
        *lines, _ = events(await response.read())
    assert json.loads(lines[-1])["choices"][0]["finish_reason"] == "stop"


async def test_P10_every_token_keeps_its_logprob_among_calls(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(_say)
    body = {**CHAT, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    async with house.post(http, "/v1/chat/completions", body) as response:
        (choice,) = (await response.json())["choices"]
    async with house.post(http, "/v1/chat/completions", {**body, "stream": True}) as response:
        lines = events(await response.read())[:-1]
    choices = [json.loads(line)["choices"][0] for line in lines]
    streamed = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert len(streamed) == -(-len(f"Let me see. {CALL}") // 7)
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Let me see."


async def test_without_tools_the_same_text_is_only_text(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(_say)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        async with house.post(http, "/v1/chat/completions", {**CHAT, **fields}) as response:
            (choice,) = (await response.json())["choices"]
        assert choice["message"]["content"] == f"Let me see. {CALL}"
        assert choice["finish_reason"] == "stop"
