"""Hears which blocks come and go in kvd's arena, for as long as it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Protocol

from kvstore.errors import StoreError
from kvstore.known import Known
from kvstore.kvd.messages import Changes

CONNECT_S = 1.0
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 2.0


class Followed(Protocol):
    """A session of kvd. Every method raises StoreError once it is gone."""

    def follow(self) -> None:
        """Changes come from now on."""

    def changes(self) -> Changes:
        """The next that come, however long that takes."""

    def interrupt(self) -> None:
        """From another thread: the call that waits now raises."""

    def close(self) -> None:
        """Idempotent."""


class Follower:
    """A thread with a session of its own. Whenever kvd can't be heard nothing is known of it."""

    def __init__(self, connect: Callable[[str, float], Followed], known: Known) -> None:
        self._connect = connect
        self._known = known
        self._control: Followed | None = None
        self._closed = Event()
        self._lock = Lock()
        known.lost()
        self._thread = Thread(target=self._run, name="kv-arena-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._control is not None:
                self._control.interrupt()
        self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                control = self._connect("follow", time.monotonic() + CONNECT_S)
            except StoreError:
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self._hear(control)
            self._closed.wait(pause_s)

    def _hear(self, control: Followed) -> None:
        """Until kvd is gone, or this is closed."""
        with self._lock:
            self._control = control
        try:
            control.follow()
            while not self._closed.is_set():
                changes = control.changes()
                self._known.changed(changes.stored, changes.removed)
        except StoreError:
            self._known.lost()
        with self._lock:
            self._control = None
        control.close()
