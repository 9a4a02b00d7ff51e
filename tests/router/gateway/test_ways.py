"""The same bytes get the same answers, and leave the connection in the same state, whether the
gateway or the library reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.serving.plain import read_head
from tests.router.gateway.house import CHAT, COMPLETION, House
from tests.router.gateway.ways import LONG, SHORT, Client, Said, asking

ALIVE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
STREAM = {**CHAT, "stream": True}
POST = b"POST /v1/chat/completions HTTP/1.1"

LINES = (
    b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions?a=b HTTP/1.1",
    b"POST http://x/v1/chat/completions HTTP/1.1", b"POST /v1/chat%2Fcompletions HTTP/1.1",
    b"POST /v1/chat/completions/ HTTP/1.1", b"POST //v1/completions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.0", b"POST /v1/chat/completions HTTP/1.2",
    b"POST  /v1/chat/completions HTTP/1.1", b"post /v1/chat/completions HTTP/1.1",
    b"PUT /v1/chat/completions HTTP/1.1", b"OPTIONS /v1/completions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.1 ", b"\r\n" + POST, b" " + POST,
)  # fmt: skip
LENGTHS = (
    b"content-length:%d", b"CONTENT-LENGTH: \t%d \t", b"Content-Length: 000%d",
    b"Content-Length: +%d", b"Content-Length: -%d", b"Content-Length: 0x%d",
    b"Content-Length: %d, 5", b"Content-Length: %d\r\nContent-Length: 5",
    b"Content-Length : %d", b" Content-Length: %d", b"Content-Length:\r\n %d",
    b"Content-Length: 1_0", b"Content-Length: %d.0", b"Content-Length:",
    b"Content-Length: 18446744073709551617", b"Content-Length: \xd9\xa5",
)  # fmt: skip
FIELDS = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"Transfer_Encoding: chunked",
    b"Transfer-Encoding\t: chunked", b"Host: y", b"Authorization: Bearer x", b"X-A: 1\r\n 2",
    b"X-A: 1\nX-B: 2", b"X-A: 1\rX-B: 2", b"X-A", b": 1", b"X(A): 1", b"X-\xc3\xa4: 1",
    b"Connection: Keep-Alive", b"Connection: CLOSE ", b"Connection: keep-alive, close",
    b"Connection:", b"Connection: x", b"Proxy-Connection: close", b"Upgrade: h2c",
    b"Expect: 100-continue", b"Expect: x", b"Content-Encoding: gzip", b"Content-Encoding: identity",
    b"Content-Type: text/plain; charset=utf-16", b"X-Request-Id: \xe4", b"X-Request-Id: mine",
    b"X-A: " + b"a" * 8_000, b"X-A: " + b"a" * 17_000, b"X" * 8_000 + b": 1",
    b"".join(b"X-%d: 1\r\n" % n for n in range(62)) + b"X: 1",
    b"".join(b"X-%d: 1\r\n" % n for n in range(130)) + b"X: 1",
)  # fmt: skip
BODIES = (STREAM, COMPLETION, {**CHAT, "model": "nobody"}, {**CHAT, "n": 0}, [], "", {})

LETTERS = st.sampled_from(b'aA0-_ \t:,;"\x00\x01\x0b\r\n\x7f\x80\xc3\xa4\xff')
OWN_FIELDS = st.builds(
    lambda name, value: b"X" + bytes(name) + b":" + bytes(value),
    st.lists(LETTERS, max_size=2),
    st.lists(LETTERS, max_size=8),
).filter(lambda field: b"\n\r\n" not in field + b"\r\n")
"""None of them ends the head: what would follow is not the body that it told of."""


def mostly(usual: object, *others: object) -> st.SearchStrategy:
    """Few odd things at a time, or the first of them decides."""
    return st.integers(0, 5).flatmap(
        lambda n: st.sampled_from(others) if n == 0 else st.just(usual)
    )


HEADS = st.builds(
    lambda line, length, fields, body: asking(
        body, b"".join(field + b"\r\n" for field in fields), line=line, length=length
    ),
    mostly(POST, *LINES),
    mostly(b"Content-Length: %d", *LENGTHS),
    st.lists(st.one_of(OWN_FIELDS, OWN_FIELDS, st.sampled_from(FIELDS)), max_size=2),
    mostly(CHAT, *BODIES),
)


def answers(house: House, way: bytes, sent: bytes) -> list[Said | None]:
    """To the request, then to another one: whether the connection lives, and is in step."""
    with Client(house, way) as client:
        client.send(sent)
        first = client.hear()
        if first is None or b"connection: close" in first.head:
            return [first, client.hear()]
        client.send(ALIVE)
        return [first, client.hear(), client.hear()]


async def in_thread(check: Callable[[], None]) -> None:
    """A property over blocking clients, beside the gateway's loop."""
    await asyncio.to_thread(check)


async def test_any_head_is_answered_alike_by_both_ways(house: House) -> None:
    ways = set()

    @settings(max_examples=60)
    @given(HEADS)
    def alike(sent: bytes) -> None:
        ways.add(read_head(sent, 10_000) is None)
        assert answers(house, SHORT, sent) == answers(house, LONG, sent)

    await in_thread(alike)
    assert ways == {True, False}
    await house.settled()


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n"
REQUESTS = {
    "plain": asking(CHAT),
    "stream": asking(STREAM),
    "the library's": asking(CHAT, b"X: 1\r\nX: 2\r\n"),
    "without a body": GET,
    "blank line first": b"\r\n" + asking(CHAT),
    "stranger": asking(CHAT, key="nobody-knows-this-key"),
    "404": asking({**CHAT, "model": "nobody"}),
    "long": asking({**CHAT, "user": "x" * 5_000}),
}
LAST = asking(CHAT, b"Connection: close\r\n")


def heard(house: House, way: bytes, parts: list[bytes]) -> list[Said | None]:
    """All answers to what is sent in these parts."""
    with Client(house, way) as client:
        for part in parts:
            client.send(part)
        return list(iter(client.hear, None))


async def test_a_row_of_requests_cut_anywhere_is_answered_alike_by_both_ways(house: House) -> None:
    @settings(max_examples=20)
    @given(st.lists(st.sampled_from([*REQUESTS]), max_size=4), st.data())
    def alike(row: list[str], data: st.DataObject) -> None:
        sent = b"".join(REQUESTS[name] for name in row) + LAST
        cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=5).map(sorted))
        parts = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if a < b]
        short, long = heard(house, SHORT, parts), heard(house, LONG, parts)
        assert short == long
        assert len(short) == len(row) + 1

    await in_thread(alike)
    await house.settled()


async def test_a_body_cut_at_every_byte_is_read(house: House) -> None:
    def alike() -> None:
        parts = [LAST[n : n + 1] for n in range(len(LAST))]
        begun = LAST.index(b"\r\n\r\n") + 4
        whole = heard(house, SHORT, [LAST])
        assert whole == heard(house, SHORT, [LAST[:begun], *parts[begun:]])
        assert whole == heard(house, SHORT, parts) == heard(house, LONG, parts)

    await in_thread(alike)
    await house.settled()
