"""Rows of the fault table that only show through the whole gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.stream import DONE
from tests.fakes.scripts import Call, Script, die_in_stream, echo, silent
from tests.router.gateway.house import CHAT, COMPLETION, House, events
from tests.waiting import PATIENCE_S, until

LONG = [{"role": "user", "content": "all of this was said before, at length " * 20}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HIDES_CALLS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
ROUTES = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)


async def test_R6_past_calls_that_the_model_would_not_see_are_refused(
    build: Callable, tiny_card: ModelCard, http: aiohttp.ClientSession
) -> None:
    template = ChatTemplate(HIDES_CALLS, tiny_card.tokenizer.specials)
    blind = House(dataclasses.replace(tiny_card, template=template), 1, {})
    history = [LONG[0], {"role": "assistant", "tool_calls": [CALL]}]
    async with (
        blind as house,
        house.post(http, "/v1/chat/completions", {**CHAT, "messages": history}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "messages[1].tool_calls"
    house = await build(1)
    async with house.post(http, "/v1/chat/completions", {**CHAT, "messages": history}) as response:
        assert response.status == 200


async def test_R6_what_a_replica_gets_holds_every_message_and_tool(
    house: House, http: aiohttp.ClientSession
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    system = {"role": "system", "content": "be brief"}
    said = CHAT["messages"]

    async def prompt(**fields: Any) -> bytes:
        before = {id(call) for call in house.calls}
        async with house.post(http, "/v1/chat/completions", {**CHAT, **fields}) as response:
            assert response.status == 200, await response.text()
        (call,) = (call for call in house.calls if id(call) not in before)
        return call.request.prompt

    plain = await prompt()
    answer = {"role": "assistant", "content": "one"}
    others = [
        await prompt(tools=[tool]),
        await prompt(messages=[system, *said]),
        await prompt(messages=[*said, answer, *said]),
        await prompt(messages=[*said, {**answer, "tool_calls": [CALL]}, *said]),
    ]
    assert len({plain, *others}) == 5
    parts = [{"type": "text", "text": letter} for letter in said[0]["content"]]
    assert await prompt(messages=[{"role": "user", "content": parts}]) == plain
    assert await prompt(tools=[tool], tool_choice="none") == plain


async def test_R15_after_a_broken_stream_its_replica_is_not_taken_for_warm(
    house: House, http: aiohttp.ClientSession
) -> None:
    body = {**CHAT, "messages": LONG, "stream": True}
    house.cannot_continue()
    house.script(die_in_stream)
    async with house.post(http, "/v1/chat/completions", body) as response:
        broken = response.headers["x-warmroute-replica"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    house.script(echo)
    await house.up(2)
    async with house.post(http, "/v1/chat/completions", body) as response:
        assert response.headers["x-warmroute-replica"] != broken
        decision = house.services.brain.decisions.get(response.headers["x-warmroute-decision"])
    assert decision.decision.predicted_cached_tokens == 0


async def close(call: Call) -> None:
    await call.ws.close()


async def end_oddly(call: Call) -> None:
    await call.send(finish="because")


async def leave_one_choice_open(call: Call) -> None:
    await call.send(child=0, finish="stop")
    await call.send("two", child=1)
    call.replica.break_links()


def after_a_word(end: Script, seen: asyncio.Event) -> Script:
    """Says one word, and ends once it was read."""

    async def script(call: Call) -> None:
        if not call.continuing:
            await call.send("one")
            await seen.wait()
        await end(call)

    return script


@ROUTES
@pytest.mark.parametrize("end", [close, end_oddly, leave_one_choice_open])
async def test_R17_no_end_but_a_clean_one_looks_clean(
    house: House, http: aiohttp.ClientSession, path: str, body: dict[str, Any], end: Script
) -> None:
    n = 2 if end is leave_one_choice_open else 1
    seen, received = asyncio.Event(), b""
    house.script(after_a_word(end, seen))
    async with house.post(http, path, {**body, "stream": True, "n": n}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                received += part
                seen.set()
    *chunks, last = [json.loads(event) for event in events(received)]
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert ends.count("stop") == n - 1
    assert set(ends) <= {None, "stop"}
    assert DONE not in received
    assert sorted(call.continuing for call in house.calls) == [False, True]
    await house.settled()


@ROUTES
async def test_R17_a_body_is_whole_or_an_error(
    house: House, http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    for end in (close, end_oddly):
        house.script(end)
        async with house.post(http, path, body) as response:
            assert response.status == 503, end
            assert int(response.headers["Retry-After"]) >= 1
            assert set(await response.json()) == {"error"}
        await house.up(2)
    await house.settled()


async def test_P16_an_id_can_be_used_again_after_its_request_was_cancelled(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(silent)
    headers = {"x-request-id": "again"}
    url = f"{house.url}/v1/chat/completions"
    leaving = asyncio.create_task(http.post(url, json=CHAT, headers=headers))
    await until(lambda: len(house.calls) == 1)
    (left,) = house.calls
    leaving.cancel()
    house.script(echo)
    async with http.post(url, json=CHAT, headers=headers) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] == "again"
    await house.settled()
    assert left.aborted.is_set()
    assert len({call.request.request_id for call in house.calls}) == 2


async def test_P11_a_body_that_says_it_is_too_large_is_not_waited_for(
    house: House, http: aiohttp.ClientSession
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    writer.write(head.encode() + b"{")
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert b" 413 " in answer.splitlines()[0]
    assert b"request_too_large" in answer
    async with house.post(http, "/v1/completions", COMPLETION) as response:
        assert response.status == 200
    await house.settled()


async def test_P10_a_prompt_that_is_scored_finds_nothing_and_that_is_no_false_hit(
    house: House, http: aiohttp.ClientSession
) -> None:
    body = {**COMPLETION, "prompt": "the same few examples before each question " * 10}

    async def cached(**fields: Any) -> tuple[int, float]:
        """Of the prompt, as predicted; and the least that a replica is trusted afterwards."""
        async with house.post(http, "/v1/completions", {**body, **fields}) as response:
            assert response.status == 200, await response.text()
            decision = response.headers["x-warmroute-decision"]
        async with http.get(f"{house.url}/router/decisions/{decision}") as response:
            decided = (await response.json())["decision"]
        (pool,) = house.fleet.pools()
        trust = min(member.trust.value for member in house.fleet.members(pool))
        return decided["predicted_cached_tokens"], trust

    assert await cached() == (0, 1.0)
    for _ in range(3):
        assert await cached(echo=True, logprobs=1) == (0, 1.0)
    # What is only on its way there is predicted, but nothing that its digest has shown.
    warm_tokens, trust = await cached()
    assert warm_tokens >= 32
    assert trust == 1.0
