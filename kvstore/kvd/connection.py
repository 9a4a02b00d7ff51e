"""One user of the daemon: frames in, frames out, and a session of the arena that ends with it.

Whoever breaks the protocol, or keeps slots for too long, is told so and is not listened to any
more; but its slots go back only once its end of the socket is closed, because until then it may
still be writing into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from events.errors import WireError
from kvstore.arena.arena import Arena
from kvstore.arena.slot import Session
from kvstore.kvd.following import Following
from kvstore.kvd.messages import (
    LENGTH,
    VERSION,
    Abort,
    Commit,
    Committed,
    Count,
    Delete,
    Exists,
    Follow,
    Hello,
    KeyList,
    Keys,
    Leased,
    Open,
    Pin,
    Purge,
    Refused,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
    Reserved,
    Stats,
    Welcome,
    body_bytes,
    frame,
    hello_of,
    request_of,
)

log = logging.getLogger(__name__)

FRAME_S = 10.0
"""How long a frame may take to arrive, the Hello included."""
UNSENT_BYTES = 1 << 20
"""A user who does not read its answers is not read from beyond this."""


class Connection(asyncio.Protocol):
    """`report` gives the daemon's own figures; `broken` is told of a fault of ours; `ended` once
    the user is gone."""

    def __init__(
        self,
        arena: Arena,
        boot: int,
        raw: socket.socket,
        report: Callable[[], Report],
        broken: Callable[[BaseException], None],
        ended: Callable[[Connection], None],
    ) -> None:
        self.session: Session | None = None
        self._arena = arena
        self._boot = boot
        self._raw: socket.socket | None = raw
        self._report = report
        self._broken = broken
        self._ended = ended
        self._buffer = bytearray()
        self._since = asyncio.get_running_loop().time()
        self._refused = False
        self._following: Following | None = None
        self._unread = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for its Hello."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Its end is closed: it has stopped."""
        self._forget_raw()
        if self._following is not None:
            self._following.close()
        if self.session is not None:
            self._arena.end(self.session)
        self._ended(self)

    def pause_writing(self) -> None:
        """It does not read its answers."""
        self._unread = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It does again."""
        self._unread = False
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Answers every whole frame."""
        if self._refused:
            return
        if not self._buffer:
            self._since = asyncio.get_running_loop().time()
        self._buffer += data
        try:
            while not self._refused and (body := self._next_body()) is not None:
                self._answer(body)
        except WireError as error:
            self.refuse(str(error))
        except Exception as error:
            self._broken(error)

    def overslept(self, now_s: float) -> bool:
        """Whether a frame, or the Hello, has been on its way for too long."""
        waiting = bool(self._buffer) or self.session is None
        return waiting and not self._refused and now_s - self._since > FRAME_S

    def tell_changes(self) -> None:
        """To a user that follows them, as fast as it reads them."""
        if self._following is None or self._transport is None or self._refused:
            return
        while not self._unread and (changes := self._following.take()) is not None:
            self._transport.write(frame(changes))

    def refuse(self, reason: str) -> None:
        """Say why, then listen for its end only."""
        if self._refused or self._transport is None:
            return
        self._refused = True
        self._buffer.clear()
        log.warning("kvd hangs up on %s: %s", self._name, reason)
        self._transport.write(frame(Refused(reason)))
        with contextlib.suppress(OSError, RuntimeError):
            self._transport.write_eof()

    def close(self) -> None:
        """The daemon ends."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def _name(self) -> str:
        return repr(self.session.name) if self.session is not None else "somebody"

    def _next_body(self) -> bytes | None:
        """The next whole frame's bytes; None while it has not come."""
        buffer, head = self._buffer, LENGTH.size
        if len(buffer) < head:
            return None
        end = head + body_bytes(buffer)
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[head:end])
        del buffer[:end]
        self._since = asyncio.get_running_loop().time()
        return body

    def _answer(self, body: bytes) -> None:
        if self.session is None:
            self._welcome(hello_of(body))
            return
        reply = self._done(self.session, request_of(body))
        if reply is not None and self._transport is not None:
            self._transport.write(frame(reply))

    def _welcome(self, hello: Hello) -> None:
        """The file descriptor travels beside the first bytes that are ever sent here."""
        if hello.version != VERSION:
            raise WireError(f"kvd speaks version {VERSION}, not {hello.version}")
        segment = self._arena.segment
        assert self._raw is not None
        assert segment.fd is not None
        message = frame(Welcome(VERSION, self._boot, segment.slot_bytes))
        try:
            sent = socket.send_fds(self._raw, [message], [segment.fd])
        except OSError as error:
            raise WireError("it has left before it was welcome") from error
        if sent != len(message):
            raise WireError("it does not read what it is told")
        self._forget_raw()
        self.session = self._arena.session(hello.name)

    def _forget_raw(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def _done(self, session: Session, request: Request) -> Reply | None:
        arena = self._arena
        match request:
            case Reserve(wants):
                return Reserved(arena.reserve(session, wants))
            case Commit(finished):
                return Committed(arena.commit(session, finished))
            case Abort(places):
                arena.abort(session, places)
            case Open(keys):
                return Leased(arena.open(session, keys))
            case Release(places):
                arena.release(session, places)
            case Follow():
                self._following = self._following or Following(arena)
                self.tell_changes()
            case _:
                return self._looked_after(request)
        return None

    def _looked_after(self, request: Request) -> Reply:
        """What operators ask for, and what needs no session."""
        arena = self._arena
        match request:
            case Exists(keys):
                return Count(arena.exists_prefix(keys))
            case Delete(keys):
                return Count(arena.delete(keys))
            case Purge(owner):
                return Count(arena.purge(owner))
            case Pin(keys, seconds) if seconds:
                return Count(arena.pin(keys, seconds))
            case Pin(keys):
                arena.unpin(keys)
                return Count(len(keys))
            case Keys(after, limit):
                return KeyList(arena.keys(after, limit))
            case Stats():
                return self._report()
            case _:
                raise WireError("a request that is not known here")


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a UNIX socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little")


def may_connect(connection: socket.socket) -> bool:
    """This user, and root."""
    return peer_uid(connection) in (os.getuid(), 0)
