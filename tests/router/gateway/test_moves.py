"""What a lost replica had in flight, and had not begun to answer, moves to another one."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from router.openai.stream import DONE
from tests.fakes.replica import echo, stall
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
