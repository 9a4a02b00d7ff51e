"""How a process uses the daemon of its host: words over its socket, bytes through its memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

from events.errors import WireError
from kvstore.arena.messages import Finished, Opened, Place, Refusal, Want
from kvstore.arena.segment import Segment
from kvstore.arena.tier import ArenaTier
from kvstore.errors import AbandonedError, StoreError
from kvstore.kvd.follow import CONNECT_S, Follower
from kvstore.kvd.messages import (
    LENGTH,
    VERSION,
    Abort,
    Changes,
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
    reply_of,
    welcome_of,
)
from kvstore.kvd.place import reachable

T = TypeVar("T", bound=Reply)
TELL_S = 1.0
SILENT_S = 86_400.0
"""After so long without a change kvd is asked anew for all of them."""
_FDS = 4


class SocketControl:
    """One session of kvd's arena. Any trouble ends it: kvd then takes back what it held."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self.segment = segment
        self._connection = connection
        self._interrupted = False

    def reserve(self, wants: Sequence[Want], deadline: float) -> Sequence[Place | Refusal]:
        """See Arena."""
        return self._ask(Reserve(list(wants)), Reserved, deadline).answers

    def commit(self, finished: Sequence[Finished], deadline: float) -> Sequence[bool]:
        """See Arena."""
        return self._ask(Commit(list(finished)), Committed, deadline).right

    def abort(self, places: Sequence[Place]) -> None:
        """See Arena."""
        self._tell(Abort(list(places)))

    def open(self, keys: Sequence[bytes], deadline: float) -> Sequence[Opened]:
        """See Arena."""
        return self._ask(Open(list(keys)), Leased, deadline).opened

    def release(self, places: Sequence[Place]) -> None:
        """See Arena."""
        self._tell(Release(list(places)))

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""
        return self._ask(Exists(list(keys)), Count, deadline).count

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""
        return self._ask(Delete(list(keys)), Count, deadline).count

    def purge(self, owner: bytes | None, deadline: float) -> int:
        """See Arena."""
        return self._ask(Purge(owner), Count, deadline).count

    def pin(self, keys: Sequence[bytes], seconds: float, deadline: float) -> int:
        """See Arena; 0 s ends pins."""
        return self._ask(Pin(list(keys), seconds), Count, deadline).count

    def keys(self, after: bytes, limit: int, deadline: float) -> list[bytes]:
        """See Arena."""
        return self._ask(Keys(after, limit), KeyList, deadline).keys

    def follow(self) -> None:
        """Changes come from now on; nothing else may be asked."""
        self._tell(Follow())

    def changes(self) -> Changes:
        """The next that come, however long that takes. Raises StoreError once kvd is gone."""
        return self._reply(Changes, time.monotonic() + SILENT_S)

    def report(self, deadline: float) -> Report:
        """The daemon's figures."""
        return self._ask(Stats(), Report, deadline)

    def interrupt(self) -> None:
        """The call that waits now raises AbandonedError."""
        self._interrupted = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives everything back."""
        self._connection.close()

    def _ask(self, request: Request, kind: type[T], deadline: float) -> T:
        self._tell(request, deadline)
        return self._reply(kind, deadline)

    def _reply(self, kind: type[T], deadline: float) -> T:
        try:
            reply = reply_of(_receive(self._connection, deadline))
        except (OSError, WireError) as error:
            raise self._lost(f"kvd does not answer: {error}", deadline) from error
        if not isinstance(reply, kind):
            reason = reply.reason if isinstance(reply, Refused) else type(reply).__name__
            raise StoreError(f"kvd answered with something else: {reason}")
        return reply

    def _tell(self, request: Request, deadline: float | None = None) -> None:
        """Sends it; what has no deadline of its own is given a short time."""
        until = time.monotonic() + TELL_S if deadline is None else deadline
        try:
            self._connection.settimeout(_left(until))
            self._connection.sendall(frame(request))
        except (OSError, WireError) as error:
            raise self._lost(f"kvd can't be told: {error}", until) from error

    def _lost(self, why: str, deadline: float) -> StoreError:
        """Whoever did not answer in time is to blame, even if we gave up in the end."""
        ours = self._interrupted and time.monotonic() < deadline
        return AbandonedError("given up") if ours else StoreError(why)


class Kvd:
    """The daemon at a path. Its memory is mapped once for all sessions of this process."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._segments: WeakValueDictionary[int, Segment] = WeakValueDictionary()
        self._lock = Lock()

    def connect(self, line: str, deadline: float) -> SocketControl:
        """A new session. Raises StoreError."""
        deadline = min(deadline, time.monotonic() + CONNECT_S)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_left(deadline))
            with reachable(self._path) as address:
                connection.connect(address)
            connection.sendall(frame(Hello(VERSION, f"{self._name}/{line}"[:64])))
            welcome, fd = _welcomed(connection, deadline)
            return SocketControl(connection, self._mapped(welcome, fd))
        except (OSError, WireError) as error:
            connection.close()
            raise StoreError(f"no kvd at {self._path}: {error}") from error
        except StoreError:
            connection.close()
            raise

    def _mapped(self, welcome: Welcome, fd: int) -> Segment:
        with self._lock:
            segment = self._segments.get(welcome.boot)
            if segment is not None:
                os.close(fd)
                return segment
            segment = Segment.attached(fd, welcome.slot_bytes)
            self._segments[welcome.boot] = segment
            return segment


def open_tier(path: Path, name: str) -> ArenaTier:
    """The arena of the daemon at `path` as a tier; it may start, end and start again meanwhile."""
    kvd = Kvd(path, name)
    return ArenaTier(
        kvd.connect, shared=True, follow=lambda known: Follower(kvd.connect, known).close
    )


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline is over")
    return left


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """One frame's body."""
    head = _exactly(connection, LENGTH.size, deadline)
    return _exactly(connection, body_bytes(head), deadline)


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        connection.settimeout(_left(deadline))
        count = connection.recv_into(view)
        if not count:
            raise WireError("kvd has hung up")
        view = view[count:]
    return bytes(data)


def _welcomed(connection: socket.socket, deadline: float) -> tuple[Welcome, int]:
    """The answer to a Hello, and the descriptor that came with its first bytes."""
    connection.settimeout(_left(deadline))
    head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, _FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        head += _exactly(connection, LENGTH.size - len(head), deadline)
        welcome = welcome_of(_exactly(connection, body_bytes(head), deadline))
        if isinstance(welcome, Refused) or welcome.version != VERSION or len(fds) != 1:
            reason = welcome.reason if isinstance(welcome, Refused) else "another version"
            raise WireError(f"kvd does not take us: {reason}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return welcome, fds[0]
