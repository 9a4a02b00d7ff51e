"""Clients that leave, at whatever stage, and clients that don't read."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from router.openai.stream import DONE
from tests.fakes.scripts import silent
from tests.router.gateway.house import (
    CHAT,
    STREAM,
    House,
    raw_request,
)
from tests.waiting import until


@pytest.mark.parametrize("leave", ["close", "half_close", "reset"])
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_O1_clients_that_leave_are_cancelled_upstream(build, leave: str, body: dict) -> None:
    house = await build()
    house.script(silent)
    count = 200 if leave == "close" else 50
    clients = [raw_request(house, "/v1/chat/completions", body) for _ in range(count)]
    await until(lambda: len(house.calls) == count)
    for client in clients:
        if leave == "half_close":
            client.shutdown(socket.SHUT_WR)
        else:
            if leave == "reset":
                linger = b"\x01\0\0\0\0\0\0\0"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.close()
    await until(house.idle)
    assert all(call.aborted.is_set() for call in house.calls)
    for client in clients:
        client.close()


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_O1_leaving_with_more_requests_behind_the_first_is_noticed(
    house: House, body: dict
) -> None:
    house.script(silent)
    client = raw_request(house, "/v1/chat/completions", body)
    await until(lambda: len(house.calls) == 1)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n"
    client.sendall((head + b" " * 2_000) * 4)
    client.close()
    await until(lambda: house.calls[0].aborted.is_set())
    await house.settled()
    assert len(house.calls) == 1


async def test_O1_leaving_in_mid_stream_aborts(house: House, http: aiohttp.ClientSession) -> None:
    async def endless(call):
        while not call.aborted.is_set():
            await call.send("x")
            await asyncio.sleep(0.01)

    house.script(endless)
    response = await house.post(http, "/v1/chat/completions", STREAM)
    await response.content.readany()
    response.close()
    await until(house.idle)
    assert house.calls[0].aborted.is_set()


async def test_O1_leaving_while_sending_the_body(house: House) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
    await until(lambda: house.services.gate.requests == 1)
    client.close()
    await until(house.idle)


async def test_O5_a_client_that_does_not_read_is_held_then_dropped(build) -> None:
    house = await build(slow_reader_s=0.3, stream_buffer_bytes=65_536)

    async def flood(call):
        while not call.aborted.is_set():
            await call.send("x" * 10_000)
            if call.held.is_set() and not call.resumed.is_set():
                await asyncio.sleep(0.01)

    house.script(flood)
    client = raw_request(house, "/v1/chat/completions", {**STREAM, "max_tokens": 1_000})
    await until(lambda: len(house.calls) == 1)
    await until(lambda: house.calls[0].aborted.is_set())
    await until(house.idle)
    client.close()
    outcome = house.services.brain.decisions.latest(1)[0].outcome
    assert outcome.status == "client_gone"


async def test_O5_an_idle_stream_gets_keep_alive_comments(
    build, http: aiohttp.ClientSession
) -> None:
    house = await build(keepalive_s=0.05)
    release = asyncio.Event()

    async def pausing(call):
        await release.wait()
        await call.answer()

    house.script(pausing)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        release.set()
        assert (await response.read()).endswith(DONE)
