"""Plain requests over raw sockets, by both ways: the gateway's own reading, and the library's."""

from __future__ import annotations

import json
import re
import socket
from typing import NamedTuple

from tests.router.gateway.house import KEYS, House

SHORT, LONG = b"", b"\r\n"
"""What comes before the first request: the library takes every connection that begins with an empty
line, and then reads the very same bytes."""

PATIENCE_S = 30.0
_IDS = re.compile(rb'"(id|created)":("[^"]*"|\d+)|req-[0-9a-f]+')


def asking(
    asked: object,
    more: bytes = b"",
    *,
    line: bytes = b"POST /v1/chat/completions HTTP/1.1",
    length: bytes = b"Content-Length: %d",
    key: str = KEYS["alice"],
) -> bytes:
    """A request. `more`: whole lines for its head."""
    body = json.dumps(asked).encode()
    own = b"Host: x\r\nAuthorization: Bearer %b\r\n" % key.encode()
    told = length % len(body) if b"%d" in length else length
    return line + b"\r\n" + own + more + told + b"\r\n\r\n" + body


def dial(house: House, room_bytes: int = 0) -> socket.socket:
    """A client; one with `room_bytes` takes little more than them unread."""
    host, port = house.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(PATIENCE_S)
    if room_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
    client.connect((host, int(port)))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


class Said(NamedTuple):
    """One answer without what differs each time: ids, times."""

    status: bytes
    head: tuple[bytes, ...]
    body: bytes


class Client:
    """Blocking, for a thread. Use as a context manager."""

    def __init__(self, house: House, way: bytes) -> None:
        self._socket = dial(house)
        self._answers = self._socket.makefile("rb")
        self._first = way

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """All of it, behind what opens this way."""
        self._socket.sendall(self._first + data)
        self._first = b""

    def hear(self) -> Said | None:
        """The next whole answer; None when the connection has ended."""
        try:
            status = self._answers.readline()
            while status.startswith(b"HTTP/1.1 100"):
                self._answers.readline()
                status = self._answers.readline()
        except ConnectionError:
            return None
        if not status:
            return None
        fields = dict(line.split(b": ", 1) for line in iter(self._answers.readline, b"\r\n"))
        fields = {name.lower(): value.strip() for name, value in fields.items()}
        if b"content-length" in fields:
            body = self._answers.read(int(fields[b"content-length"]))
        else:
            body = b"".join(iter(self._chunk, b""))
        steady = {
            name: b"" if name == b"date" or name.startswith(b"x-") else value
            for name, value in fields.items()
            if name != b"content-length"
        }
        head = tuple(sorted(b"%b: %b" % field for field in steady.items()))
        return Said(status, head, _IDS.sub(b"", body))

    def _chunk(self) -> bytes:
        size = int(self._answers.readline(), 16)
        data = self._answers.read(size)
        assert self._answers.readline() == b"\r\n"
        return data
