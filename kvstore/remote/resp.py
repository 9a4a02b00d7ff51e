"""A lean RESP2/3 client: pipelines; large values go straight between socket and memory.

hiredis parses every reply but one: the body of a GET never passes through a parser, it is received
into the destination. (redis-py packs and copies each argument; at 1 MiB that is the bottleneck.)
One connection serves one thread. After any exception the connection is of no use: close it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from kvstore.remote.endpoint import Endpoint
from kvstore.stream import Part, Stream, WireBrokenError, left_s

CONNECT_TIMEOUT_S = 2.0
WINDOW_BYTES = 8 * 1024 * 1024
"""Asked for, or sent, and not answered yet: bounds what a server holds for us."""

MAX_HEAD_BYTES = 64 * 1024
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
Argument = Part | tuple[Part, ...]
"""A tuple is one argument in several pieces."""
Command = Sequence[Argument]
Wanted = Callable[[bytes], bool]
"""Whether the bytes before the destination's are what belongs there."""


class RespError(WireBrokenError):
    """The server does not speak the protocol, or refuses us."""


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
        self._stream = Stream(_open(endpoint, deadline), tls=endpoint.tls is not None)
        try:
            self.server = self._log_in(endpoint, deadline)
        except BaseException:
            self.close()
            raise

    def interrupt(self) -> None:
        """From another thread: whoever waits on this connection fails at once."""
        self._stream.interrupt()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def call(self, *command: Part, deadline: float) -> Any:
        """One command. Raises RespError when the server answers with an error."""
        [reply] = self.pipeline([command], deadline)
        if isinstance(reply, hiredis.ReplyError):
            raise RespError(str(reply))
        return reply

    def pipeline(
        self, commands: Sequence[Command], deadline: float, asking: bool = False
    ) -> list[Any]:
        """All replies, in order; an error is a hiredis.ReplyError among them.

        What is sent without an answer is bounded by WINDOW_BYTES or one command. `asking` marks
        each command as redirected by ASK.
        """
        replies: list[Any] = []
        at = 0
        while at < len(commands):
            parts: list[Part] = []
            size, first = 0, at
            while at < len(commands) and (size < WINDOW_BYTES or at == first):
                encoded = _encode(commands[at])
                parts += (_ASKING, *encoded) if asking else encoded
                size += sum(len(part) for part in encoded)
                at += 1
            self._stream.send(parts, deadline)
            for _ in range(at - first):
                if asking:
                    self._reply(deadline)
                replies.append(self._reply(deadline))
        return replies

    def get_into(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        wanted: Wanted,
        deadline: float,
        landed: Callable[[int, Value | Odd | hiredis.ReplyError | None], None],
        asking: bool = False,
    ) -> None:
        """GET every key; the last len(into[i]) bytes of value i land in `into[i]`.

        `landed(i, what)` is called in order: Value with the bytes before those, None for no such
        key, Odd for a value that is too short or whose head is not `wanted`, or the server's
        error. `asking` marks each GET as redirected by ASK.
        """
        sent, open_bytes = 0, 0
        for index, room in enumerate(into):
            batch = bytearray()
            while sent < len(keys) and (open_bytes < WINDOW_BYTES or sent == index):
                batch += _ASKING if asking else b""
                batch += b"".join(_encode((b"GET", keys[sent])))
                open_bytes += len(into[sent])
                sent += 1
            if batch:
                self._stream.send([batch], deadline)
            # As a line: the parser would take the value behind it, too.
            if asking and self._stream.line(deadline) != b"+OK":
                raise RespError("the answer to ASKING is not OK")
            landed(index, self._value(room, wanted, deadline))
            open_bytes -= len(room)

    def _value(self, room: memoryview, wanted: Wanted, deadline: float) -> Any:
        line = self._stream.line(deadline)
        if not line.startswith(b"$") or line == b"$-1":
            return self._parse(line + b"\r\n")
        size = _size(line)
        head_bytes = size - len(room)
        what: Value | Odd = Odd(size)
        if 0 <= head_bytes <= MAX_HEAD_BYTES:
            head = self._stream.take(head_bytes, deadline)
            if wanted(head):
                what = Value(head)
                self._stream.receive(room, deadline)
            size = len(room)
        if isinstance(what, Odd):
            self._stream.skip(size, deadline)
        if self._stream.take(2, deadline) != b"\r\n":
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
            self._reader.feed(self._stream.some(deadline))
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


def _open(endpoint: Endpoint, deadline: float) -> socket.socket:
    timeout_s = min(CONNECT_TIMEOUT_S, left_s(deadline))
    plain = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    if endpoint.tls is None:
        return plain
    try:
        return endpoint.tls.wrap_socket(plain, server_hostname=endpoint.host)
    except (OSError, ssl.SSLError):
        plain.close()
        raise


def _encode(command: Command) -> list[Part]:
    """Small arguments are joined; those in pieces stay what they are."""
    out: list[Part] = []
    text = bytearray(b"*%d\r\n" % len(command))
    for argument in command:
        if isinstance(argument, tuple):
            text += b"$%d\r\n" % sum(len(piece) for piece in argument)
            out += [text, *argument]
            text = bytearray()
        else:
            text += b"$%d\r\n" % len(argument)
            text += argument
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
