"""What is no good HTTP request: refused in OpenAI's shape, and nothing of it quoted."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import aiohttp
import pytest

from tests.router.gateway.house import CHAT, House, chat_status

CANARY = b"canary-0123"
CHAT_LINE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
GET_LINE = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, CHAT_LINE + b"Content-Length: " + CANARY + b"\r\n\r\n"),
        (400, CHAT_LINE + b"Content-Length: -1\r\nX: " + CANARY + b"\r\n\r\n"),
        (400, CHAT_LINE + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n"),
        (400, CHAT_LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
        (400, CHAT_LINE + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
        (400, CHAT_LINE + b"Transfer-Encoding: " + CANARY + b"\r\n\r\n"),
        (413, CHAT_LINE + b"Content-Length: 9999999999\r\n\r\n"),
        (414, b"GET /" + CANARY * 1_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (431, GET_LINE + b"X: " + CANARY * 2_000 + b"\r\n\r\n"),
        (431, GET_LINE + b"X-" + CANARY * 2_000 + b": 1\r\n\r\n"),
        (431, GET_LINE + b"".join(b"X-%d: %s\r\n" % (n, CANARY) for n in range(200)) + b"\r\n"),
        (417, GET_LINE + b"Expect: " + CANARY + b"\r\n\r\n"),
        (417, b"GET /nope HTTP/1.1\r\nHost: x\r\nExpect: " + CANARY + b"\r\n\r\n"),
        (400, GET_LINE + CANARY + b"\r\n\r\n"),
        (400, GET_LINE + b"X y: " + CANARY + b"\r\n\r\n"),
        (400, CANARY + b" / HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, CANARY + b"\r\n\r\n"),
        (400, b"GET " + CANARY + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, b"GET /health HTTP/" + CANARY + b"\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00" + CANARY),
    ],
)
async def test_P11_O8_broken_http_is_refused_in_openais_shape_without_quotes(
    house: House, http: aiohttp.ClientSession, status: int, sent: bytes
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 15)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 %d " % status, b"HTTP/1.0 %d " % status))
    assert b"application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert CANARY not in answer
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200


async def test_expect_100_continue_is_served(house: House) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{house.url}/v1/chat/completions", json=CHAT, expect100=True) as response,
    ):
        assert response.status == 200


async def test_whoever_leaves_before_100_continue_is_no_fault_of_ours(
    house: House, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    for _ in range(20):
        client = socket.create_connection((host, int(port)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(CHAT_LINE + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
        client.close()
    assert await chat_status(house, http) == 200
    await house.settled()
    assert caplog.text == ""
