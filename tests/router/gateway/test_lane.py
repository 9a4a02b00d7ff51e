"""The short way of the generating routes gives what the long one gives, which takes the rest."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import ClassVar

import pytest

from router.serving.answers import Answers
from router.serving.plain import read_head
from tests.router.gateway.house import CHAT, KEYS, House
from tests.waiting import until

EXPECT = b"Expect: 100-continue\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ROUTE = "/v1/chat/completions"
VARIES = re.compile(rb"(?m)^(date|x-[a-z-]+|content-length): .*$", re.IGNORECASE)


def asking(body: bytes, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nHost: x\r\nAuthorization: Bearer %b\r\n%bContent-Length: %d\r\n\r\n"
    return head % (ROUTE.encode(), version, KEYS["alice"].encode(), more, len(body)) + body


async def told(house: House, sent: bytes) -> bytes:
    """All that comes back, for requests of which the last one ends the connection."""
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 15)
    writer.close()
    return answer.removeprefix(CONTINUE)


def head_lines(answer: bytes) -> list[bytes]:
    head = answer.partition(b"\r\n\r\n")[0]
    return sorted(VARIES.sub(rb"\1: ...", head).replace(b"\r", b"").lower().split(b"\n"))


@pytest.mark.parametrize(
    "body",
    [CHAT, {**CHAT, "stream": True}, {**CHAT, "model": "nobody"}, {**CHAT, "n": 0}, []],
    ids=["whole", "stream", "404", "400", "no object"],
)
async def test_both_ways_say_the_same_head_and_count_the_same(house: House, body: object) -> None:
    data = json.dumps(body).encode()
    short = await told(house, asking(data, b"Connection: close\r\n"))
    long = await told(house, asking(data, b"Connection: close\r\n" + EXPECT))
    assert head_lines(short) == head_lines(long)
    assert b"x-request-id: ..." in head_lines(short)
    status = short.split()[1].decode()
    line = f'warmroute_requests_total{{route="{ROUTE}",status="{status}"}} 2.0'
    assert line in house.services.metrics.text().decode()
    await house.settled()


async def test_an_old_client_is_told_whether_the_connection_stays(house: House) -> None:
    data = json.dumps(CHAT).encode()
    old = await told(house, asking(data, version=b"1.0"))
    assert old.startswith(b"HTTP/1.0 200 OK\r\n")
    assert not any(line.startswith(b"connection:") for line in head_lines(old))
    kept = asking(data, b"Connection: keep-alive\r\n", b"1.0") + asking(data, version=b"1.0")
    first, second = (await told(house, kept)).split(b"HTTP/1.0 200 OK\r\n")[1:]
    assert b"Connection: keep-alive" in first
    assert b"Connection:" not in second


async def test_requests_one_behind_the_other_are_answered_in_order(house: House) -> None:
    data = json.dumps(CHAT).encode()
    several = [asking(data, b"x-request-id: mine-%d\r\n" % n) for n in range(8)]
    last = asking(data, b"x-request-id: mine-8\r\nConnection: close\r\n")
    answer = await told(house, b"".join([*several, last]))
    ids = re.findall(rb"x-request-id: (\S+)", answer)
    assert ids == [b"mine-%d" % n for n in range(9)]
    await house.settled()


async def test_a_body_in_chunks_and_one_that_comes_late_are_read(house: House) -> None:
    data = json.dumps(CHAT).encode()
    head = asking(b"", b"Connection: close\r\n").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    answer = await told(house, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
    assert answer.startswith(b"HTTP/1.1 200 ")
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = asking(data, b"Connection: close\r\n")
    for part in (sent[:20], sent[20:-30], sent[-30:]):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(reader.read(), 15)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await house.settled()


async def test_a_body_over_the_bound_in_chunks_is_413(house: House) -> None:
    most = house.services.config.router.max_body_bytes
    head = asking(b"", b"Connection: close\r\n").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = await told(house, head + chunk * (most // 0x10000 + 1) + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


LENGTH = b"Content-Length: 2\r\n"


@pytest.mark.parametrize(
    ("lines", "plain"),
    [
        (b"Host: x\r\n" + LENGTH, True),
        (b"host:x\r\ncontent-length:2\r\nconnection: Keep-Alive\r\nX-A: \xc3\xa4\r\n", True),
        (b"Host: x\r\n" + LENGTH + b"Connection: close\r\n", True),
        (LENGTH + b"Accept: a\r\n", False),
        (b"Host: x\r\nAccept: a\r\n", False),
        (b"Host: x\r\nHost: y\r\n" + LENGTH, False),
        (b"Host: x\r\n" + LENGTH + LENGTH, False),
        (b"Host: x\r\nContent-Length: 0\r\n", False),
        (b"Host: x\r\nContent-Length: +2\r\n", False),
        (b"Host: x\r\nContent-Length: 2, 2\r\n", False),
        (b"Host: x\r\nContent-Length: 11\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"Transfer-Encoding: chunked\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"Expect: 100-continue\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"Content-Encoding: gzip\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"Connection: Upgrade\r\nUpgrade: h2c\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"X-A : 1\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"X-A: 1\r\n 2\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"X-A: \x00\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"X-A: 1\n\r\n", False),
        (b"Host: x\r\n" + LENGTH + b"X-A: " + b"1" * 9_000 + b"\r\n", False),
    ],
)
def test_a_head_is_plain_only_where_nobody_could_read_it_otherwise(
    lines: bytes, plain: bool
) -> None:
    data = b"POST /v1/completions HTTP/1.1\r\n" + lines + b"\r\n{}"
    head = read_head(data, 10)
    assert (head is not None) is plain
    if head is not None:
        assert (head.path, head.length, data[head.end :]) == ("/v1/completions", 2, b"{}")
        assert head.keep_alive is (b"close" not in lines)
    assert read_head(data.replace(b"POST", b"PUT"), 10) is None
    assert read_head(data.replace(b"1.1", b"1.0"), 10) is None
    assert read_head(data[: -len(b"\r\n{}")], 10) is None


def test_blanks_in_a_head_are_read_in_one_pass() -> None:
    def least_s(filler: bytes) -> float:
        value = b"a" + filler * 7_800 + b"a"
        data = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"X-A: " + value
        taken_s = []
        for _ in range(3):
            began_s = time.process_time()
            head = read_head(data + b"\r\n\r\n{}", 10)
            taken_s.append(time.process_time() - began_s)
            assert head is not None
            assert head.headers["X-A"].encode() == value
        return min(taken_s)

    # Tried anew at each blank they would cost a thousand times as much.
    assert least_s(b" ") < 50 * least_s(b"b")


async def test_a_connection_goes_on_with_whatever_comes_behind_a_plain_request(
    house: House,
) -> None:
    data = json.dumps(CHAT).encode()
    model = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n"
    several = [asking(data), asking(data), model % KEYS["alice"].encode(), asking(data)]
    answer = await told(house, b"".join(several) + asking(data, b"Connection: close\r\n"))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert answer.count(b'"object":"chat.completion"') == 4
    await house.settled()


async def test_a_refused_body_is_read_to_its_end_and_the_next_request_answered(
    house: House,
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(CHAT).encode() + b" " * 200_000
    nobody = asking(data).replace(KEYS["alice"].encode(), b"nobody-knows-this-key")
    writer.write(nobody[:-100_000])
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 15)
    assert head.startswith(b"HTTP/1.1 401 ")
    writer.write(nobody[-100_000:] + asking(data, b"Connection: close\r\n"))
    assert b"HTTP/1.1 200 OK\r\n" in await asyncio.wait_for(reader.read(), 15)
    writer.close()
    await house.settled()


@pytest.mark.parametrize("left", [1, 150_000], ids=["near its end", "beyond what is kept unread"])
async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(
    house: House, left: int
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(asking(json.dumps(CHAT).encode() + b" " * 300_000)[:-left])
    await writer.drain()
    await until(lambda: house.services.gate.requests > 0)
    writer.close()
    await house.settled()
    assert not len(house.services.bodies.held)


class _Asked(dict):
    """A request, as far as the way in looks at it."""

    headers: ClassVar[dict[str, str]] = {}


class _Broken(Answers):
    """Whose runs can't be left."""

    def __exit__(self, *error: object) -> None:
        raise KeyError("broken")


async def test_all_is_given_back_whatever_of_it_raises(house: House) -> None:
    of = house.services
    tenant, asked = of.tenants.anonymous, _Asked()
    with pytest.raises(KeyError), of.admitter.enter(asked, tenant) as visit:
        visit.answers = _Broken([], "main")
        assert of.gate.requests == of.admitter.limits.account(tenant).inside == 1
    assert of.gate.requests == of.admitter.limits.account(tenant).inside == 0
