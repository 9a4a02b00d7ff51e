"""A lean RESP2/3 client: pipelines; large values go straight between socket and memory.

hiredis parses every reply but one: the body of a GET never passes through a parser, it is received
into the destination. (redis-py packs and copies each argument; at 1 MiB that is the bottleneck.)
One connection serves one thread. After any exception the connection is of no use: close it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from kvstore.remote.endpoint import Endpoint

CONNECT_TIMEOUT_S = 2.0
RECEIVE_BYTES = 16 * 1024
WINDOW_BYTES = 8 * 1024 * 1024
"""Asked for, or sent, and not answered yet: bounds what a server holds for us."""
_PARTS_MAX = 256
"""To one sendmsg; the kernel's limit is 1,024."""

Part = bytes | bytearray | memoryview
Command = Sequence[Part]


class RespError(ConnectionError):
    """The peer does not speak the protocol, or refuses us."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value whose tail landed in the destination."""

    head: bytes


@dataclass(frozen=True, slots=True)
class Odd:
    """A value that fits no destination: it was skipped."""

    size_bytes: int


class RespConnection:
    """Connected and logged in. Raises OSError (RespError is one) from every method."""

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self._reader = hiredis.Reader(protocolError=RespError, notEnoughData=False)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._socket = _open(endpoint, deadline)
        self._tls = endpoint.tls is not None
        try:
            self.server = self._log_in(endpoint, deadline)
        except BaseException:
            self.close()
            raise

    def interrupt(self) -> None:
        """From another thread: whoever waits on this connection fails at once."""
        with contextlib.suppress(OSError):
            # Not the TLS object's shutdown: that would want to talk.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def call(self, *command: Part, deadline: float) -> Any:
        """One command. Raises RespError when the server answers with an error."""
        [reply] = self.pipeline([command], deadline)
        if isinstance(reply, hiredis.ReplyError):
            raise RespError(str(reply))
        return reply

    def pipeline(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """All replies, in order; an error is a hiredis.ReplyError among them.

        What is sent without an answer is bounded by WINDOW_BYTES or one command.
        """
        replies: list[Any] = []
        at = 0
        while at < len(commands):
            parts: list[Part] = []
            size, first = 0, at
            while at < len(commands) and (size < WINDOW_BYTES or at == first):
                parts += _encode(commands[at])
                size += sum(len(part) for part in commands[at])
                at += 1
            self._send(parts, deadline)
            replies += [self._reply(deadline) for _ in range(at - first)]
        return replies

    def get_into(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        max_head_bytes: int,
        deadline: float,
        landed: Callable[[int, Value | Odd | hiredis.ReplyError | None], None],
        asking: bool = False,
    ) -> None:
        """GET every key; the last len(into[i]) bytes of value i land in `into[i]`.

        `landed(i, what)` is called in order: Value with the bytes before those, None for no such
        key, Odd for a value that is too short or whose head would be longer than
        `max_head_bytes`, or the server's error. `asking` marks each GET as redirected by ASK.
        """
        sent, open_bytes = 0, 0
        for index, room in enumerate(into):
            batch = bytearray()
            while sent < len(keys) and (open_bytes < WINDOW_BYTES or sent == index):
                batch += b"*1\r\n$6\r\nASKING\r\n" if asking else b""
                batch += b"".join(_encode((b"GET", keys[sent])))
                open_bytes += len(into[sent])
                sent += 1
            if batch:
                self._send([batch], deadline)
            if asking:
                self._reply(deadline)
            landed(index, self._value(room, max_head_bytes, deadline))
            open_bytes -= len(room)

    def _value(self, room: memoryview, max_head_bytes: int, deadline: float) -> Any:
        line = self._line(deadline)
        if not line.startswith(b"$") or line == b"$-1":
            return self._parse(line + b"\r\n")
        size = _size(line)
        head_bytes = size - len(room)
        if 0 <= head_bytes <= max_head_bytes:
            head = bytearray(head_bytes)
            self._receive(memoryview(head), deadline)
            self._receive(room, deadline)
            what: Value | Odd = Value(bytes(head))
        else:
            self._skip(size, deadline)
            what = Odd(size)
        if self._take(2, deadline) != b"\r\n":
            raise RespError("a value does not end where it said")
        return what

    def _log_in(self, endpoint: Endpoint, deadline: float) -> dict[str, Any]:
        """HELLO 3 where the server knows it, else AUTH; returns what the server says of itself."""
        login = [b"AUTH", (endpoint.username or "default").encode(), endpoint.password.encode()]
        with_password = bool(endpoint.password)
        [hello] = self.pipeline([[b"HELLO", b"3", *(login if with_password else ())]], deadline)
        server: dict[str, Any] = {}
        if isinstance(hello, dict):
            server = {str(_text(key)): _text(value) for key, value in hello.items()}
        elif not isinstance(hello, hiredis.ReplyError):
            raise RespError("the answer to HELLO is no map")
        elif not _unknown_hello(hello):
            raise RespError(f"the store refuses us: {_code(hello)}")
        elif with_password:
            self.call(*(login if endpoint.username else (login[0], login[2])), deadline=deadline)
        if endpoint.database:
            self.call(b"SELECT", str(endpoint.database).encode(), deadline=deadline)
        return server

    def _reply(self, deadline: float) -> Any:
        """The next whole reply, of any type."""
        while (reply := self._parsed()) is False:
            self._reader.feed(self._some(deadline))
        return reply

    def _parsed(self) -> Any:
        """What the parser has; False while it is not whole."""
        try:
            return self._reader.gets()
        except (TypeError, MemoryError) as error:  # maps as keys, lists of thousands of millions
            raise RespError(f"an answer that can't be: {type(error).__name__}") from None

    def _parse(self, line: bytes) -> Any:
        self._reader.feed(line)
        reply = self._parsed()
        if reply is not None and not isinstance(reply, hiredis.ReplyError):
            raise RespError("the answer to a GET is neither a value nor an error")
        return reply

    def _some(self, deadline: float) -> bytes:
        if self._start == self._end:
            self._fill(deadline)
        data = bytes(self._view[self._start : self._end])
        self._start = self._end = 0
        return data

    def _line(self, deadline: float) -> bytes:
        while (found := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= RECEIVE_BYTES // 2:
                raise RespError("a line without an end")
            self._fill(deadline)
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _take(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        self._receive(memoryview(data), deadline)
        return bytes(data)

    def _skip(self, size: int, deadline: float) -> None:
        waste = memoryview(bytearray(min(size, 256 * 1024)))
        while size > 0:
            self._receive(waste[: min(size, len(waste))], deadline)
            size -= min(size, len(waste))

    def _receive(self, room: memoryview, deadline: float) -> None:
        """Exactly `room`: first what lies here already, then from the socket without a copy."""
        have = min(self._end - self._start, len(room))
        room[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(room):
            # Whatever arrives behind `room` lands in the buffer, in the same call.
            got = self._receive_some([room[have:], self._view], deadline)
            self._start, self._end = 0, max(0, got - (len(room) - have))
            have = min(len(room), have + got)

    def _fill(self, deadline: float) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == RECEIVE_BYTES:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._end += self._receive_some([self._view[self._end :]], deadline)

    def _receive_some(self, rooms: list[memoryview], deadline: float) -> int:
        self._socket.settimeout(left_s(deadline))
        one = self._socket.recv_into if self._tls else None  # TLS has no scattered receive
        got = one(rooms[0]) if one else self._socket.recvmsg_into(rooms)[0]
        if not got:
            raise RespError("the store closed the connection")
        return got

    def _send(self, parts: list[Part], deadline: float) -> None:
        if self._tls:
            for part in parts:
                self._socket.settimeout(left_s(deadline))
                self._socket.sendall(part)
            return
        queue = [memoryview(part) for part in parts if len(part)]
        at = 0
        while at < len(queue):
            self._socket.settimeout(left_s(deadline))
            sent = self._socket.sendmsg(queue[at : at + _PARTS_MAX])
            while at < len(queue) and sent >= len(queue[at]):
                sent -= len(queue[at])
                at += 1
            if sent:
                queue[at] = queue[at][sent:]


def left_s(deadline: float) -> float:
    """Seconds until the monotonic `deadline`. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left


def _open(endpoint: Endpoint, deadline: float) -> socket.socket:
    timeout_s = min(CONNECT_TIMEOUT_S, left_s(deadline))
    plain = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if endpoint.tls is None:
        return plain
    try:
        return endpoint.tls.wrap_socket(plain, server_hostname=endpoint.host)
    except (OSError, ssl.SSLError):
        plain.close()
        raise


def _encode(command: Command) -> list[Part]:
    """Small parts are joined; a memoryview stays what it is."""
    out: list[Part] = []
    text = bytearray(b"*%d\r\n" % len(command))
    for part in command:
        text += b"$%d\r\n" % len(part)
        if isinstance(part, memoryview):
            out += [text, part]
            text = bytearray()
        else:
            text += part
        text += b"\r\n"
    out.append(text)
    return out


def _size(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise RespError("a value without a size")
    return int(digits)


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _code(error: hiredis.ReplyError) -> str:
    """The first word of an error: the rest may repeat what we sent."""
    return str(error).partition(" ")[0]


def _unknown_hello(error: hiredis.ReplyError) -> bool:
    return "unknown command" in str(error).lower() or _code(error) == "NOPROTO"
