"""A plain request as the express reads it, and heads of answers as bytes.

Plain: a POST to a generating route in HTTP/1.1, every header given once, a body of a length that
is told. What is anything else is no request here: the HTTP library reads it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpVersion, HttpVersion11
from multidict import CIMultiDict, CIMultiDictProxy

MAX_HEAD_BYTES = 8 * 1024
HEADS_KEPT = 1_024
"""The latest ones, read already."""

_HEAD = re.compile(
    rb"POST (/v1/(?:chat/)?completions) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n){2,64})\r\n"
)
_LENGTH = re.compile(rb"[Cc]ontent-[Ll]ength: ?([0-9]{1,12})\r\n")
_FIELDS = re.compile(r"([^:\r]+):[ \t]*([^\r]*[^\r \t]|)[ \t]*\r\n")
_NAMES = re.compile(r"([^:\r]+):[^\r]*\r\n")
_FOR_THE_LIBRARY = frozenset(
    ("transfer-encoding", "expect", "content-encoding", "upgrade", "proxy-connection")
)
_REASONS = {status.value: status.phrase for status in HTTPStatus}
SERVER_LINE = f"Server: {SERVER_SOFTWARE}\r\n\r\n"
"""The last line of every head, and the empty one behind it."""


class Wire(Protocol):
    """The connection that a request came on."""

    transport: asyncio.Transport
    full: bool

    def want_body(self) -> None:
        """Somebody waits for the rest of it."""

    async def drained(self) -> None:
        """Until the socket takes more."""


class PlainRequest(dict[Any, Any]):
    """What handlers ask of a request. Items are for whoever marks it. `body` is None until all of
    it is there."""

    __slots__ = (
        "_whole", "body", "client_max_size", "content_length", "headers", "keep_alive", "path",
        "protocol", "transport", "version",
    )  # fmt: skip

    def __init__(self, head: Head, client_max_size: int, wire: Wire) -> None:
        self.path = head.path
        self.headers = head.headers
        self.content_length = head.length
        self.keep_alive = head.keep_alive
        self.version: HttpVersion = HttpVersion11
        self.client_max_size = client_max_size
        self.protocol = wire
        self.transport = wire.transport
        self.body: bytes | None = None
        self._whole: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body."""
        self.protocol.want_body()
        if self.body is None:
            self._whole = asyncio.get_running_loop().create_future()
            await self._whole
        assert self.body is not None
        return self.body

    def complete(self, body: bytes) -> None:
        """All of it has come."""
        self.body = body
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)


class Head(NamedTuple):
    """A request's head, `end` bytes long; `length` bytes of body follow."""

    path: str
    headers: Mapping[str, str]
    length: int
    keep_alive: bool
    end: int


def read_head(data: bytes, most_bytes: int) -> Head | None:
    """The head at the start of `data`; None unless it is there whole, plain, and told a body of 1
    to `most_bytes` bytes. Its headers are those of others too, and lack the length."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    told = _LENGTH.search(data, 0, end)
    if told is None:
        return None
    length = int(told[1])
    known = _parsed(data[: told.start(1)] + data[told.end(1) : end])
    if known is None or not 0 < length <= most_bytes:
        return None
    path, headers, keep_alive = known
    return Head(path, headers, length, keep_alive, end)


@lru_cache(HEADS_KEPT)
def _parsed(data: bytes) -> tuple[str, Mapping[str, str], bool] | None:
    """Path, headers and whether the connection stays, of a head whose length was cut out: a client
    says the same each time but for that."""
    found = _HEAD.fullmatch(data)
    if found is None:
        return None
    text = found[2].decode(errors="surrogateescape")
    headers = CIMultiDict(_FIELDS.findall(text))
    names = set(_NAMES.findall(text.lower()))
    ends = headers.get("Connection", "").lower()
    if (
        len(names) < len(headers)
        or "host" not in names
        or not names.isdisjoint(_FOR_THE_LIBRARY)
        or headers.pop("Content-Length", None) != ""  # what was cut out is not its value
        or ends not in ("", "keep-alive", "close")
    ):
        return None
    return found[1].decode(), CIMultiDictProxy(headers), ends != "close"


def head_of(status: int, headers: Mapping[str, str], keep_alive: bool) -> bytes:
    """An answer's head, up to and with the empty line."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    ends = "" if keep_alive else "Connection: close\r\n"
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{lines}{ends}"
        f"Date: {rfc822_formatted_time()}\r\n{SERVER_LINE}"
    ).encode()


class WholeAnswer:
    """A whole answer, 200, of JSON: whoever writes it marks it, head and body in one write."""

    __slots__ = ("body", "headers")
    status = 200
    prepared = False

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.body = body
        self.headers = headers


class StreamAnswer:
    """An answer whose body comes in parts: in chunks, unless its headers tell a length. Has what
    EventWriter asks of the library's own."""

    __slots__ = ("_request", "chunked", "headers", "prepared", "transport")
    status = 200

    def __init__(self, request: PlainRequest, headers: Mapping[str, str]) -> None:
        self.headers = CIMultiDict(headers)
        self.prepared = False
        self.chunked = False
        self.transport = request.transport
        self._request = request

    async def prepare(self, request: PlainRequest) -> StreamAnswer:
        """Write the head. Raises ConnectionError."""
        self._check()
        self.chunked = "Content-Length" not in self.headers
        if self.chunked:
            self.headers["Transfer-Encoding"] = "chunked"
        self.transport.write(head_of(self.status, self.headers, request.keep_alive))
        self.prepared = True
        return self

    async def write(self, data: bytes) -> None:
        """Write, and wait while the socket is full. Raises ConnectionError."""
        self._check()
        if not data:
            return  # an empty chunk would be the end
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
        await self._request.protocol.drained()

    async def write_eof(self) -> None:
        """The clean end. Raises ConnectionError."""
        self._check()
        if self.chunked:
            self.transport.write(b"0\r\n\r\n")
        await self._request.protocol.drained()

    def _check(self) -> None:
        if self.transport.is_closing():
            raise ConnectionResetError("the client is gone")
