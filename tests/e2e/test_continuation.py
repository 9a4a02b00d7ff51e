"""Two real engines: a stream that breaks anywhere and goes on elsewhere is the unbroken one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from configs.model.card import load_card
from tests.e2e.engines import Pair, texts
from tests.router.gateway.house import events

TOKENS = 20
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the system is in the world of words"}],
    "max_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION = {**CHAT, "prompt": CHAT["messages"][0]["content"]}
del COMPLETION["messages"]
SAMPLED = {"temperature": 0.8, "seed": 7}
LONG = {**CHAT, **SAMPLED, "max_tokens": 120}
OBJECT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Ulan Bator"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
SCHEMA = {"name": "answer", "strict": True, "schema": OBJECT}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": OBJECT}}
OTHER = {"type": "function", "function": {"name": "clock"}}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "seeded": ("/v1/completions", {**COMPLETION, **SAMPLED, "top_p": 0.9}),
    "logprobs": ("/v1/chat/completions", {**CHAT, **SAMPLED, "logprobs": True, "top_logprobs": 2}),
    "penalties": (
        "/v1/chat/completions",
        {**CHAT, **SAMPLED, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    ),
    "choices": ("/v1/completions", {**COMPLETION, **SAMPLED, "n": 3}),
    "schema": (
        "/v1/chat/completions",
        {**LONG, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "call": ("/v1/chat/completions", {**LONG, "tools": [TOOL], "tool_choice": "required"}),
    "choices of calls": (
        "/v1/chat/completions",
        {**LONG, "tools": [TOOL, OTHER], "tool_choice": "required", "n": 2},
    ),
    "regex with a stop string": (
        "/v1/completions",
        {**COMPLETION, **SAMPLED, "structured_outputs": {"regex": "([a-f]{2}-){9}"}, "stop": "c-"},
    ),
}


@pytest.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Pair]:
    async with Pair(load_card(tiny_model)) as pair:
        yield pair


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Reply:
    """What a client got, but for ids and times."""

    def __init__(self, raw: bytes) -> None:
        *chunks, done = events(raw)
        assert done == b"[DONE]", done
        documents = [json.loads(chunk) for chunk in chunks]
        choices = [c for document in documents for c in document["choices"]]
        self.texts = texts(documents)
        self.calls = calls(choices)
        self.ends = sorted(
            (c["index"], c["finish_reason"]) for c in choices if c["finish_reason"] is not None
        )
        self.usage = (
            documents[-1]["usage"]["completion_tokens"],
            documents[-1]["usage"]["prompt_tokens"],
        )
        entries = [e for c in choices for e in (c.get("logprobs") or {}).get("content") or ()]
        self.logprobs = [(e["token"], [t["token"] for t in e["top_logprobs"]]) for e in entries]
        self.values = [e["logprob"] for e in entries]

    def assert_equals(self, other: Reply) -> None:
        assert self.texts == other.texts
        assert self.calls == other.calls
        assert self.ends == other.ends
        assert self.usage == other.usage
        assert self.logprobs == other.logprobs
        assert self.values == pytest.approx(other.values, abs=1e-4)


def calls(choices: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[str, str]]:
    """Names and arguments, by choice and number."""
    joined: dict[tuple[int, int], tuple[str, str]] = {}
    for choice in choices:
        for call in choice.get("delta", {}).get("tool_calls") or ():
            name, arguments = joined.get((choice["index"], call["index"]), ("", ""))
            said = call["function"]
            joined[choice["index"], call["index"]] = (
                name + (said.get("name") or ""),
                arguments + (said.get("arguments") or ""),
            )
    return joined


async def ask(pair: Pair, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Reply:
    async with pair.house.post(http, path, body) as response:
        return Reply(await response.read())


async def broken(
    pair: Pair, http: aiohttp.ClientSession, path: str, body: dict[str, Any], steps: int
) -> Reply:
    """The answer of which one replica gave so many steps."""
    pair.let_through(steps)
    killing = asyncio.create_task(pair.kill_who_shuts())
    reply = await ask(pair, http, path, body)
    await killing
    return reply


def continuations(pair: Pair) -> int:
    text = pair.house.services.metrics.text().decode()
    return int(float(text.split("\nwarmroute_continuations_total ")[1].split()[0]))


def with_stop(reply: Reply) -> list[str]:
    """A stop string of several tokens out of the middle of an answer."""
    text = reply.texts[0]
    middle = len(text) // 2
    return [text[middle : middle + 5]]


async def check(
    pair: Pair, http: aiohttp.ClientSession, name: str, first: int = 0, every: int = 1
) -> None:
    path, body = SETTINGS[name]
    whole = await ask(pair, http, path, body)
    cuts = range(first, whole.usage[0] // len(whole.ends), every)
    for steps in cuts:
        (await broken(pair, http, path, body, steps)).assert_equals(whole)
    attempts = [r.decision.attempt for r in pair.house.services.brain.decisions.latest(1_000)]
    assert attempts.count(2) == len(cuts)
    assert continuations(pair) > (len(cuts) - 1) // 2, "most cuts come behind the first delta"


FREE = tuple(SETTINGS)[:5]
"""The others have grammars, which a replica that starts anew compiles anew."""


@pytest.mark.parametrize("name", FREE)
async def test_R16_continued_is_unbroken(
    pair: Pair, http: aiohttp.ClientSession, name: str
) -> None:
    await check(pair, http, name, FREE.index(name), 6)


async def test_R16_a_stop_string_straddles_the_cut(pair: Pair, http: aiohttp.ClientSession) -> None:
    path, body = SETTINGS["seeded"]
    stop = with_stop(await ask(pair, http, path, body))
    whole = await ask(pair, http, path, {**body, "stop": stop})
    assert whole.ends == [(0, "stop")]
    last = whole.usage[0]
    for steps in range(last - 4, last):
        (await broken(pair, http, path, {**body, "stop": stop}, steps)).assert_equals(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
async def test_R16_continued_is_unbroken_wherever_it_breaks(
    pair: Pair, http: aiohttp.ClientSession, name: str
) -> None:
    await check(pair, http, name, every=1 if name in FREE else 17)
