"""Waiting in the router, through the whole gateway: little lies in a replica's own queue."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable

import aiohttp
import pytest

from router.openai.stream import DONE
from tests.fakes.scripts import stall
from tests.router.gateway.house import CHAT, COMPLETION, KEYS, House
from tests.waiting import until


def long() -> str:
    """Unlike any other, and longer than what a replica is given ahead: each has one at a time."""
    return f"{next(_numbers)} " + "word " * 60


def completion() -> dict:
    return {**COMPLETION, "prompt": long()}


def stream() -> dict:
    return {**completion(), "stream": True}


def several() -> dict:
    return {**COMPLETION, "prompt": [long(), long(), "a"]}


def chat() -> dict:
    return {**CHAT, "messages": [{"role": "user", "content": long()}]}


_numbers = itertools.count(1_000)

Stalled = tuple[Callable, asyncio.Event]

ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion),
        ("/v1/completions", stream),
        ("/v1/completions", several),
        ("/v1/chat/completions", chat),
    ],
)


@pytest.fixture
async def stalled(build: Callable) -> Stalled:
    """`await make(replicas, **settings)`: replicas that take one request at a time and answer none
    before the event."""
    release = asyncio.Event()

    async def make(replicas: int = 1, **settings: object) -> House:
        house = await build(replicas, prefill_ahead_ms=1.0, **settings)
        house.script(stall(release))
        return house

    return make, release


def ask(
    house: House, http: aiohttp.ClientSession, path: str, body: dict, key: str | None = None
) -> asyncio.Task[int]:
    async def status() -> int:
        async with house.post(http, path, body, key=key) as response:
            await response.read()
            return response.status

    return asyncio.create_task(status())


@ROUTES
async def test_S6_a_burst_waits_in_the_router(
    stalled: Stalled, http: aiohttp.ClientSession, path: str, body: Callable
) -> None:
    make, release = stalled
    house = await make(2)
    asked = [ask(house, http, path, body()) for _ in range(20)]
    queue = house.services.admitter.queue
    # Several prompts are chosen for a turn of the loop after their request was let go.
    await until(lambda: house.services.gate.requests == 20 and queue.requests >= 14)
    assert max(replica.open_calls for replica in house.replicas) <= 9
    release.set()
    assert set(await asyncio.gather(*asked)) == {200}
    await house.settled()


@ROUTES
async def test_O1_a_client_that_leaves_the_queue_was_never_there(
    stalled: Stalled, http: aiohttp.ClientSession, path: str, body: Callable
) -> None:
    make, release = stalled
    house = await make()
    asked = [ask(house, http, path, body()) for _ in range(5)]
    queue = house.services.admitter.queue
    await until(lambda: house.services.gate.requests == 5 and queue.requests > 0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await house.settled()
    assert queue.tokens == 0
    release.set()
    assert await ask(house, http, path, body()) == 200


async def test_O4_beyond_its_bound_the_queue_refuses_at_once(
    stalled: Stalled, http: aiohttp.ClientSession
) -> None:
    make, release = stalled
    house = await make(max_queued_requests=4)
    asked = [ask(house, http, "/v1/completions", completion(), key=KEYS["alice"]) for _ in range(3)]
    await until(lambda: house.services.admitter.queue.requests == 2)
    async with house.post(http, "/v1/completions", completion(), key=KEYS["alice"]) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "overloaded"
    asked.append(ask(house, http, "/v1/completions", completion(), key=KEYS["bob"]))
    release.set()
    assert set(await asyncio.gather(*asked)) == {200}
    await house.settled()


async def test_a_replica_that_dies_lets_those_who_wait_for_it_go(
    stalled: Stalled, http: aiohttp.ClientSession
) -> None:
    make, _ = stalled
    house = await make()
    asked = [ask(house, http, "/v1/completions", completion()) for _ in range(5)]
    await until(lambda: house.services.admitter.queue.requests == 4)
    await house.replicas[0].die()
    assert set(await asyncio.gather(*asked)) == {503}
    await house.settled()


async def test_O5_a_stream_that_waits_for_its_turn_gets_comments_and_then_its_answer(
    stalled: Stalled, http: aiohttp.ClientSession
) -> None:
    make, release = stalled
    house = await make(keepalive_s=0.03)
    first = ask(house, http, "/v1/completions", completion())
    await until(lambda: house.replicas[0].open_calls == 1)
    async with house.post(http, "/v1/completions", stream()) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert house.services.admitter.queue.requests == 1
        release.set()
        assert (await response.read()).endswith(DONE)
    assert await first == 200
    await house.settled()


async def test_O5_a_refusal_behind_a_comment_is_an_error_and_no_end(
    stalled: Stalled, http: aiohttp.ClientSession
) -> None:
    make, _ = stalled
    house = await make(keepalive_s=0.03, first_token_timeout_s=0.5)
    first = ask(house, http, "/v1/completions", completion())
    await until(lambda: house.replicas[0].open_calls == 1)
    read = b""
    async with house.post(http, "/v1/completions", stream()) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            while True:
                read += await response.content.readuntil(b"\n\n")
    *comments, error, rest = read.split(b"\n\n")
    assert set(comments) == {b": keep-alive"}
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] in ("overloaded", "timeout")
    assert rest == b""
    await first
    await house.settled()


async def test_O1_a_client_that_leaves_behind_a_comment_was_never_there(
    stalled: Stalled, http: aiohttp.ClientSession
) -> None:
    make, release = stalled
    house = await make(keepalive_s=0.03)
    first = ask(house, http, "/v1/completions", completion())
    await until(lambda: house.replicas[0].open_calls == 1)
    async with house.post(http, "/v1/completions", stream()) as response:
        await response.content.readuntil(b"\n\n")
    await until(lambda: house.services.admitter.queue.requests == 0)
    release.set()
    assert await first == 200
    await house.settled()
