"""Streams on real sockets: many deltas at once, slow readers, readers that leave, broken links."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence

import aiohttp
import pytest

from events.output import CoreDelta, CoreFinish, StepFrame, Usage
from events.wire import encode
from router.openai.stream import DONE
from tests.fakes.scripts import Call
from tests.router.gateway.house import CHAT, COMPLETION, House, events, raw_request
from tests.waiting import PATIENCE_S, until

STREAM = {**CHAT, "stream": True, "max_tokens": 1_000}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


async def send_all(call: Call, texts: Sequence[str], finish: str | None = None) -> None:
    """One frame with a delta for each text, as a replica sends it whose link has lagged."""
    request = call.request
    deltas = [
        CoreDelta(request.request_id, request.attempt, 0, text, (1,), (), Usage(9, 0, 1))
        for text in texts
    ]
    if finish is not None:
        end = CoreFinish(reason=finish)
        deltas.append(
            CoreDelta(request.request_id, request.attempt, 0, "", (), (), Usage(9, 0, 1), end)
        )
    await call.ws.send_bytes(encode(StepFrame(deltas=tuple(deltas))))


def texts_of(body: bytes) -> list[str]:
    """What each event added."""
    chunks = [json.loads(event) for event in events(body) if event != b"[DONE]"]
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if "choices" in chunk]
    return [text for text in said if text]


async def read_until(response: aiohttp.ClientResponse, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        got += await response.content.readany()
    return got


async def test_each_delta_of_a_frame_is_an_event_and_all_of_them_one_chunk(
    house: House, http: aiohttp.ClientSession
) -> None:
    seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send("first")
        await seen.wait()
        await send_all(call, LETTERS)
        await call.send(finish="stop")

    house.script(script)
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        got = await read_until(response, b"first")
        seen.set()
        chunk = b""
        while not chunk:
            chunk, _ = await response.content.readchunk()
        assert texts_of(chunk) == list(LETTERS)
        got += chunk + await response.read()
    assert got.endswith(DONE)
    await house.settled()
    assert house.services.brain.decisions.latest(1)[0].outcome.status == "ok"


@pytest.mark.parametrize("end", ["break", "odd"])
async def test_R17_a_break_after_pushed_deltas_is_told_behind_them(
    build: Callable, http: aiohttp.ClientSession, end: str
) -> None:
    house = await build(1, retries=0)
    seen, all_seen = asyncio.Event(), asyncio.Event()

    async def script(call: Call) -> None:
        await call.send("first")
        await seen.wait()
        await send_all(call, LETTERS)
        await all_seen.wait()
        if end == "odd":
            await call.send(finish="because")
        else:
            await call.ws.close()

    house.script(script)
    got = b""
    async with house.post(http, "/v1/chat/completions", STREAM) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                got += part
                seen.set()
                if b'"z"' in got:
                    all_seen.set()
    assert texts_of(got) == ["first", *LETTERS]
    assert set(json.loads(events(got)[-1])) == {"error"}
    assert DONE not in got
    await house.settled()


async def test_O1_leaving_in_the_middle_of_a_flood_leaves_nothing(house: House) -> None:
    async def flood(call: Call) -> None:
        await call.send("first")
        while not call.aborted.is_set():
            await send_all(call, ["x" * 50] * 20)
            await asyncio.sleep(0.001)

    house.script(flood)
    clients = [raw_request(house, "/v1/chat/completions", STREAM) for _ in range(20)]
    await until(lambda: len(house.calls) == 20)
    for number, client in enumerate(clients):
        await asyncio.to_thread(client.recv, 4_096)
        if number % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
    await house.settled()
    assert all(call.aborted.is_set() for call in house.calls)
    assert len(house.services.links.up()) == 2


async def test_O5_a_reader_that_was_held_gets_all_of_it_and_a_neighbour_does_not_wait(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(1, slow_reader_s=60.0, stream_buffer_bytes=65_536)
    blocks: list[str] = []

    async def flood(call: Call) -> None:
        if call.request.sampling.max_tokens == 8:
            await send_all(call, LETTERS, finish="stop")
            return
        await call.send("first")
        while not call.held.is_set():
            blocks.append(f"{len(blocks):06}" + "x" * 10_000)
            await send_all(call, [blocks[-1]])
            await asyncio.sleep(0)
        await call.resumed.wait()
        await send_all(call, ["last"], finish="stop")

    house.script(flood)
    client = raw_request(house, "/v1/chat/completions", STREAM)
    await until(lambda: bool(house.calls) and house.calls[0].held.is_set())
    async with house.post(http, "/v1/chat/completions", {**CHAT, "stream": True}) as response:
        assert (await response.read()).endswith(DONE)
    body = b""
    while not body.endswith(b"\r\n0\r\n\r\n"):
        body += await asyncio.to_thread(client.recv, 1 << 20)
    client.close()
    assert "".join(texts_of(unchunked(body))) == "first" + "".join(blocks) + "last"
    await house.settled()


def unchunked(response: bytes) -> bytes:
    """The body of a chunked response."""
    rest, body = response.split(b"\r\n\r\n", 1)[1], b""
    while True:
        size, rest = rest.split(b"\r\n", 1)
        if not int(size, 16):
            return body
        assert rest[int(size, 16) :].startswith(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


async def test_an_older_client_gets_the_stream_without_chunks(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send("first")
        await send_all(call, LETTERS, finish="stop")

    house.script(script)
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(STREAM).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    body = answer.split(b"\r\n\r\n", 1)[1]
    assert "".join(texts_of(body)) == "first" + LETTERS
    assert body.endswith(DONE)


async def test_several_prompts_are_one_stream(house: House, http: aiohttp.ClientSession) -> None:
    async def script(call: Call) -> None:
        await call.send("first")
        await send_all(call, LETTERS, finish="stop")

    house.script(script)
    body = {**COMPLETION, "prompt": ["a", "b", "c"], "stream": True}
    async with house.post(http, "/v1/completions", body) as response:
        got = await response.read()
    said = dict.fromkeys(range(3), "")
    for event in events(got)[:-1]:
        (choice,) = json.loads(event)["choices"]
        said[choice["index"]] += choice["text"]
    assert said == dict.fromkeys(range(3), "first" + LETTERS)
    assert got.endswith(DONE)


async def test_no_write_waits_for_an_acknowledgement(
    house: House, http: aiohttp.ClientSession
) -> None:
    """Nagle's algorithm against delayed acknowledgements costs 44 ms a stream on some gateways."""
    async with http.get(f"{house.url}/health") as response:
        assert response.status == 200
        (protocol,) = house.gateway._runner.server.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
