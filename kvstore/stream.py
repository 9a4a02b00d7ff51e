"""A socket with deadlines, and received bytes that go straight to where they belong.

What arrives behind the wanted bytes lands in a small buffer in the same call, so that large values
cost no copy and small ones no call of their own. The kernel keeps the time (SO_RCVTIMEO,
SO_SNDTIMEO): Python's own timeouts cost a poll before every call. TLS sockets can't do either and
take Python's way. One thread uses a stream; any may interrupt it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

RECEIVE_BYTES = 16 * 1024
MAX_LINE_BYTES = 8 * 1024
_WASTE_BYTES = 256 * 1024
_TIMEVAL = struct.Struct("@ll")
_SLACK = 0.05
"""A time that is off by so much is not set anew."""
_PARTS_MAX = 256
"""To one sendmsg; the kernel's limit is 1,024."""

_RECORD_BYTES = 32 * 1024
"""Up to here a copy costs less than a call."""

Part = bytes | bytearray | memoryview


class WireBrokenError(ConnectionError):
    """The other end has gone, or does not keep to the protocol."""


class Stream:
    """Raises OSError from every method; after one the stream is of no use: close it."""

    def __init__(self, connected: socket.socket, tls: bool = False) -> None:
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._tls = tls
        self._armed_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        if not tls:
            connected.settimeout(None)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def shake_hands(self, deadline: float) -> None:
        """With TLS: both ends have shown their certificates when this returns."""
        assert isinstance(self._socket, ssl.SSLSocket)
        self._arm(socket.SO_RCVTIMEO, deadline)
        self._socket.do_handshake()

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        """All of it, without joining the parts."""
        if self._tls:
            for part in _records(parts):
                rest = memoryview(part)
                while rest:
                    self._arm(socket.SO_SNDTIMEO, deadline)
                    rest = rest[self._socket.send(rest) :]
            return
        queue = [memoryview(part) for part in parts if len(part)]
        at = 0
        while at < len(queue):
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(queue[at : at + _PARTS_MAX])
            except BlockingIOError:
                continue
            while at < len(queue) and sent >= len(queue[at]):
                sent -= len(queue[at])
                at += 1
            if sent:
                queue[at] = queue[at][sent:]

    def receive(self, room: memoryview, deadline: float) -> None:
        """Exactly `room`: first what lies here already, then without a copy."""
        have = min(self._end - self._start, len(room))
        room[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(room):
            rest = room[have:]
            got = self._scatter([rest, self._view], deadline)
            self._start, self._end = 0, max(0, got - len(rest))
            have = min(len(room), have + got)

    def take(self, size: int, deadline: float) -> bytes:
        """The next `size` bytes; for small sizes that were checked."""
        data = bytearray(size)
        self.receive(memoryview(data), deadline)
        return bytes(data)

    def skip(self, size: int, deadline: float) -> None:
        """Drop the next `size` bytes."""
        waste = memoryview(bytearray(min(size, _WASTE_BYTES)))
        while size > 0:
            self.receive(waste[: min(size, len(waste))], deadline)
            size -= min(size, len(waste))

    def line(self, deadline: float) -> bytes:
        """Up to CR LF, without it."""
        while (found := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= MAX_LINE_BYTES:
                raise WireBrokenError("a line without an end")
            self._fill(deadline)
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def some(self, deadline: float) -> bytes:
        """Whatever comes next, one byte at least."""
        if self._start == self._end:
            self._fill(deadline)
        data = bytes(self._view[self._start : self._end])
        self._start = self._end = 0
        return data

    def waiting(self) -> bool:
        """Whether bytes lie here or in the kernel already."""
        if self._start < self._end:
            return True
        try:
            if self._tls:
                self._socket.settimeout(0.0)
                got = self._socket.recv_into(self._view)
            else:
                got = self._socket.recv_into(self._view, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        if not got:
            raise WireBrokenError("the other end has closed")
        self._start, self._end = 0, got
        return True

    def interrupt(self) -> None:
        """From another thread: whoever waits on this stream fails at once."""
        with contextlib.suppress(OSError):
            # Not the TLS object's shutdown: that would want to talk.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _fill(self, deadline: float) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == RECEIVE_BYTES:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._end += self._scatter([self._view[self._end :]], deadline)

    def _scatter(self, rooms: list[memoryview], deadline: float) -> int:
        """One byte at least."""
        while True:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                one = self._socket.recv_into if self._tls else None  # TLS scatters nothing
                got = one(rooms[0]) if one else self._socket.recvmsg_into(rooms)[0]
            except BlockingIOError:
                continue
            if not got:
                raise WireBrokenError("the other end has closed")
            return got

    def _arm(self, option: int, deadline: float) -> None:
        """The next call ends at about the deadline. Raises TimeoutError when that has come."""
        left = left_s(deadline)
        if self._tls:
            self._socket.settimeout(left)
        elif abs(self._armed_s[option] - left) > _SLACK * left:
            micros = max(1, int(left * 1e6))
            value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
            self._armed_s[option] = left


def _records(parts: Sequence[Part]) -> Iterator[Part]:
    """Small parts together: each call to send makes a record, and a packet, of its own."""
    small: list[Part] = []
    for part in parts:
        if len(part) <= _RECORD_BYTES:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield b"".join(small)


def left_s(deadline: float) -> float:
    """Seconds until the monotonic `deadline`. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left
