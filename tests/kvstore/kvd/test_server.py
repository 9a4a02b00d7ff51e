"""The daemon's loop with a clock of its own: who is late, who is too many (K5, K8)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Want
from kvstore.arena.segment import Segment
from kvstore.errors import StoreError
from kvstore.kvd import connection, server
from kvstore.kvd.client import Kvd
from kvstore.kvd.messages import VERSION, Hello, Stats, frame
from kvstore.kvd.place import Place
from kvstore.kvd.server import serve
from tests.kvstore.blocks import LAYOUT, run_of

SOON_S = 60.0


class Host:
    """The daemon's loop in a thread of this process."""

    def __init__(self, path: Path, limits: ArenaLimits) -> None:
        self.arena = Arena(Segment.shared(4 << 20), limits)
        self.kvd = Kvd(path, "test")
        self.ended: Exception | None = None
        self._place = Place(path)
        self._listener = self._place.listen()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(
                serve(self.arena, self._listener, self._place.boot, self._stop)
            )
        except StoreError as error:
            self.ended = error

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SOON_S)
        self._loop.close()
        self._place.leave()
        self.arena.segment.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "kvd.sock", ArenaLimits(write_s=0.15, lease_s=0.15))
    yield host
    host.close()
    host.arena.check()
    assert host.arena.stats().sessions == 0


def until(seen: object, what: object) -> None:
    """`seen()` becomes `what`."""
    assert callable(seen)
    deadline = time.monotonic() + SOON_S
    while seen() != what:
        assert time.monotonic() < deadline, seen()


def test_K2_a_user_that_is_stuck_is_hung_up_on_and_its_slots_are_kept_from_others(
    host: Host,
) -> None:
    deadline = time.monotonic() + SOON_S
    stuck, other = host.kvd.connect("stuck", deadline), host.kvd.connect("other", deadline)
    block = run_of(1)[0]
    want = Want(block.key, LAYOUT.payload_bytes, block.scope)
    (place,) = stuck.reserve([want], deadline)
    until(lambda: host.arena.stats().quarantined, 1)
    (another,) = other.reserve([want], deadline)
    assert another != place
    other.abort([another])
    with pytest.raises(StoreError):
        stuck.report(deadline)
    assert host.arena.stats().quarantined == 1
    stuck.close()
    until(lambda: host.arena.stats().used_bytes, 0)
    assert host.arena.stats().overdue == 1
    other.close()


def test_more_users_than_there_may_be_are_not_let_in(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    deadline = time.monotonic() + SOON_S
    users = [host.kvd.connect(str(number), deadline) for number in range(2)]
    with pytest.raises(StoreError):
        host.kvd.connect("too many", deadline)
    users.pop().close()
    until(lambda: host.arena.stats().sessions, 1)
    users.append(host.kvd.connect("in its place", deadline))
    for user in users:
        user.close()


@pytest.mark.parametrize("said", [b"", b"\x09\0", frame(Hello(VERSION, "half"))[:-1]])
def test_a_frame_that_never_ends_is_given_up(
    said: bytes, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FRAME_S", 0.05)
    with socket.socket(socket.AF_UNIX) as user:
        user.settimeout(SOON_S)
        user.connect(str(tmp_path / "kvd.sock"))
        user.sendall(said)
        answer = b""
        while part := user.recv(4_096):
            answer += part
    assert b"unfinished" in answer


def test_who_does_not_read_the_answers_is_not_read_from(host: Host, tmp_path: Path) -> None:
    deadline = time.monotonic() + SOON_S
    with socket.socket(socket.AF_UNIX) as user:
        user.connect(str(tmp_path / "kvd.sock"))
        user.sendall(frame(Hello(VERSION, "deaf")))
        user.settimeout(0.3)
        asked = frame(Stats()) * 1_000
        with pytest.raises(TimeoutError):
            for _ in range(1_000):
                user.sendall(asked)
        other = host.kvd.connect("other", deadline)
        assert other.report(deadline).stats.sessions == 2
        other.close()


def test_wrong_books_end_the_daemon_loudly(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("the books are wrong")

    monkeypatch.setattr(host.arena, "stats", broken)
    control = host.kvd.connect("x", time.monotonic() + SOON_S)
    with pytest.raises(StoreError):
        control.report(time.monotonic() + SOON_S)
    control.close()
    until(lambda: host.ended is not None, True)
    monkeypatch.undo()
