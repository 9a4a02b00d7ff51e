"""Structured answers and tool calls: the official client, the real gateway, real engines.

The model is random: what fits a schema here fits because of the grammar, not because of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat import AsyncChatCompletionStream
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict

from configs.model.card import ModelCard, load_card
from tests.e2e.engines import Pair
from tests.router.gateway.house import KEYS

USER = {"role": "user", "content": "What is the weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


class City(BaseModel):
    """What the client asks for by its own class."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Oslo", "Rome"]
    big: bool


@pytest.fixture(scope="module")
def card(tiny_model) -> ModelCard:
    return load_card(tiny_model)


@pytest.fixture
async def pair(card: ModelCard) -> AsyncIterator[Pair]:
    async with Pair(card) as made:
        yield made


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[AsyncOpenAI]:
    url = f"{pair.house.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=KEYS["alice"], max_retries=0, timeout=30) as made:
        yield made


async def chat(client: AsyncOpenAI, **fields: Any) -> ChatCompletion:
    settings = {"model": "tiny", "messages": [USER], "max_tokens": 200, "seed": 5, **fields}
    return await client.chat.completions.create(**settings)


def schema(value: dict) -> dict:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": value},
    }


SIZES = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["size", "n"],
    "additionalProperties": False,
}


async def test_a_schema_is_kept_streamed_or_not(client: AsyncOpenAI) -> None:
    whole = await chat(client, response_format=schema(SIZES), n=3, temperature=1.0)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert value["size"] in ("S", "M")
        assert value["n"] <= 99
    chunks = await chat(client, response_format=schema(SIZES), n=3, temperature=1.0, stream=True)
    streamed = {0: "", 1: "", 2: ""}
    async for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert [streamed[each.index] for each in whole.choices] == [
        each.message.content for each in whole.choices
    ]


async def test_the_client_parses_its_own_class(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="tiny",
        messages=[USER],
        response_format=City,
        max_tokens=200,
        seed=5,
    )
    found = answer.choices[0]
    assert found.finish_reason == "stop"
    assert isinstance(found.message.parsed, City)


FORMS = [
    ({"regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
    ({"choice": ["yes, of course", 'a "no"']}, r'yes, of course|a "no"'),
    ({"grammar": 'start: "a" B\nB: /[xy]{2}/'}, "a[xy]{2}"),
    ({"grammar": 'root ::= "a" [xy] [xy]'}, "a[xy]{2}"),
    ({"json": {"const": 7}}, "7"),
]


async def test_other_forms_on_both_routes(client: AsyncOpenAI) -> None:
    for outputs, pattern in FORMS:
        body = {"structured_outputs": outputs}
        answer = await chat(client, extra_body=body)
        assert re.fullmatch(pattern, answer.choices[0].message.content)
        text = await client.completions.create(
            model="tiny", prompt="x", max_tokens=40, extra_body=body, seed=3
        )
        assert re.fullmatch(pattern, text.choices[0].text)


BAD_FORMS = {
    "non-object property": schema({"type": "object", "properties": {"a": "string"}}),
    "bad regex": schema({"type": "string", "pattern": "(a"}),
    "recursion": schema({"properties": {"x": {"$ref": "#"}}, "required": ["x"], "type": "object"}),
    "huge enum": schema({"enum": ["x" * 1000 + str(i) for i in range(2000)]}),
    "unknown type": schema({"type": "objekt"}),
    "keyword": schema({"not": {}}),
    "form": {"type": "yaml"},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_P12_what_cannot_be_enforced_is_400(
    pair: Pair, client: AsyncOpenAI, stream: bool
) -> None:
    for name, form in BAD_FORMS.items():
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, response_format=form, stream=stream)
        assert refused.value.type == "invalid_request_error", name
        assert refused.value.param.startswith("response_format"), name
    assert (await chat(client, max_tokens=2)).choices[0].finish_reason == "length"
    assert not any(replica.attempts for replica in pair.replicas)


async def test_a_required_call_is_made_and_answered(client: AsyncOpenAI) -> None:
    asked = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await chat(client, **asked, temperature=1.0)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    check(call.function.name, call.function.arguments)
    history = [USER, choice.message.model_dump(exclude_none=True),
               {"role": "tool", "tool_call_id": call.id, "content": "cold"}]  # fmt: skip
    after = await chat(client, **asked, messages=history)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens
    assert after.choices[0].message.tool_calls[0].id != call.id


async def test_a_named_tool_is_the_one_called(client: AsyncOpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = await chat(client, tools=[CLOCK, WEATHER], tool_choice=choice, n=2, temperature=1.0)
    for each in answer.choices:
        (call,) = each.message.tool_calls
        check(call.function.name, call.function.arguments)
        assert call.function.name == "get_weather"


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "get_weather":
        assert value["city"] in ("Oslo", "Rome")
        assert 1 <= value["days"] <= 9
    else:
        assert (name, value) == ("clock", {})


async def test_P7_streamed_calls_accumulate(client: AsyncOpenAI) -> None:
    """With the client's own accumulator; several calls in one answer."""
    asked = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "temperature": 1.0}
    async with client.chat.completions.stream(
        model="tiny", messages=[USER], max_tokens=120, seed=2, **asked
    ) as stream:
        events = [event async for event in stream]
        final = await final_of(stream)
    deltas = [
        call
        for event in events
        if event.type == "chunk"
        for choice in event.chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    heads = [call for call in deltas if call.id is not None]
    assert [call.index for call in heads] == list(range(len(heads)))
    assert all(call.function.name and call.type == "function" for call in heads)
    assert not any(call.function.name for call in deltas if call.id is None)
    assert len({call.id for call in heads}) == len(heads) >= 1
    whole = await chat(client, max_tokens=120, seed=2, **asked)
    assert final == [
        (call.function.name, call.function.arguments)
        for call in whole.choices[0].message.tool_calls
    ]
    for name, arguments in final[:-1]:
        check(name, arguments)


async def final_of(stream: AsyncChatCompletionStream) -> list[tuple[str, str]]:
    """What the accumulator has made; the last call may be cut by the length."""
    calls = stream.current_completion_snapshot.choices[0].message.tool_calls
    return [(call.function.name, call.function.arguments) for call in calls]


async def test_tools_that_nobody_has_to_call(client: AsyncOpenAI) -> None:
    for fields in ({}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        answer = await chat(client, tools=[WEATHER], max_tokens=12, **fields)
        message = answer.choices[0].message
        assert message.tool_calls is None
        assert message.content


async def test_a_call_goes_on_where_its_replica_died(pair: Pair, client: AsyncOpenAI) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    plain = (await chat(client, **asked)).choices[0]
    pair.let_through(21)
    chunks = await chat(client, **asked, stream=True)
    first = await anext(aiter(chunks))
    assert first.choices[0].delta.role == "assistant"
    await pair.kill_who_shuts()
    name, arguments, reason = "", "", None
    async for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (name, arguments, reason) == (
        "get_weather",
        plain.message.tool_calls[0].function.arguments,
        "tool_calls",
    )
    check(name, arguments)


@pytest.mark.slow
async def test_the_default_model_answers_and_calls(real_model: Path) -> None:
    """SmolLM2 knows nothing of tools by its template; what it says here makes sense."""
    async with Pair(load_card(real_model)) as pair:
        url = f"{pair.house.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEYS["alice"], timeout=120) as client:
            answer = await chat(client, response_format=schema(SIZES), temperature=0)
            assert json.loads(answer.choices[0].message.content)["size"] in ("S", "M")
            asked = {"tools": [WEATHER, CLOCK], "temperature": 0}
            forced = await chat(client, **asked, tool_choice="required", parallel_tool_calls=False)
            (call,) = forced.choices[0].message.tool_calls
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments)["city"] == "Oslo"
