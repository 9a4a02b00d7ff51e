"""What a lost replica had in flight, and had not begun to answer, moves to another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest

from events.errors import QUEUE_LONGER, CoreError
from router.openai.stream import DONE
from tests.fakes.replica import Call, echo, stall
from tests.router.gateway.house import CHAT, COMPLETION, House
from tests.router.gateway.kit import until

REQUESTS = 80
"""More than the budget of retries holds."""


async def read(house: House, http: aiohttp.ClientSession) -> bytes:
    async with house.post(http, "/v1/chat/completions", {**CHAT, "stream": True}) as response:
        return await response.read()


async def test_R17_all_that_a_lost_replica_had_not_begun_moves(
    house: House, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    house.script(stall(release))
    reading = [asyncio.create_task(read(house, http)) for _ in range(REQUESTS)]
    await until(lambda: len(house.calls) == REQUESTS)
    victim = house.calls[0].replica
    assert sum(call.replica is victim for call in house.calls) > 20
    house.script(echo)
    await victim.die()
    release.set()
    bodies = await asyncio.gather(*reading)
    assert all(body.endswith(DONE) for body in bodies)
    await house.settled()


async def overtaken(call: Call) -> None:
    """As if others had filled this replica's queue."""
    if call.request.believed_queue_tokens is None:
        await call.answer()
    else:
        await call.refuse(CoreError(status=429, message="x", code=QUEUE_LONGER, reroute=True))


async def test_R1_a_request_that_was_sent_to_a_longer_queue_moves_once_without_credit(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(replicas=2, retries=0)
    house.script(overtaken)
    for _ in range(REQUESTS):
        before = len(house.calls)
        async with house.post(http, "/v1/chat/completions", CHAT) as response:
            assert response.status == 200
        first, second = sorted(house.calls, key=lambda call: call.request.dispatch_seq)[before:]
        assert first.replica is not second.replica
        assert (first.request.believed_queue_tokens, second.request.attempt) == (0, 2)
    await house.settled()


async def test_R1_a_request_with_nowhere_else_to_go_stays(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(replicas=1)
    house.script(overtaken)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    assert [call.request.attempt for call in house.calls] == [1]
    await house.settled()


async def test_R1_when_the_others_have_gone_meanwhile_it_comes_back(
    house: House, http: aiohttp.ClientSession
) -> None:
    async def alone(call: Call) -> None:
        for other in house.replicas:
            if other is not call.replica:
                await other.die()
        await house.up(1)
        await overtaken(call)

    house.script(alone)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    assert len({call.replica for call in house.calls}) == 1
    await house.settled()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]}),
    ],
)
async def test_R17_a_plain_answer_survives_the_loss_of_its_replica_half_way(
    house: House, http: aiohttp.ClientSession, path: str, body: dict
) -> None:
    """Nothing was delivered yet: it is made anew elsewhere, and only the new one is told."""

    lost = []

    async def break_half_way(call) -> None:
        lost.append(call.replica)
        if call.replica is not lost[0]:
            await call.answer()
            return
        await call.send("lost")
        call.replica.break_links()

    house.script(break_half_way)
    async with house.post(http, path, body) as response:
        answer = json.loads(await response.read())
    assert response.status == 200, answer
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert set(texts) == {"one two three"}
    await house.settled()
