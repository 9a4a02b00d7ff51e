"""Where kvd's socket is: one daemon to a place, paths of any length, nothing left of the last."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import StoreError

_MAX_PATH_BYTES = 100
"""The kernel takes 107."""


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """An address of the socket that is short enough for the kernel, inside the block."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def host_store_name(socket_path: str) -> str:
    """What replicas of one host call the store that they share: what any of them shows of it, all
    of them can read, and other hosts through its peer port."""
    return f"{socket.gethostname()}:{socket_path}"


class Place:
    """Holds a socket path for this process, until it ends: the kernel lets go of the lock then.

    `boot` is larger than every one before it at this path, and at least the wall clock's time.
    """

    def __init__(self, path: Path) -> None:
        """Raises StoreError when another daemon lives there."""
        self.path = path
        try:
            self._lock = _locked(path.with_name(path.name + ".lock"))
        except OSError as error:
            raise StoreError(f"can't use {path.parent}: {error.strerror}") from error
        self.boot = _next_boot(self._lock)

    def listen(self) -> socket.socket:
        """Accepts connections of this user alone. What a dead daemon left is removed first."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            before = os.umask(0o177)
            try:
                with reachable(self.path) as address:
                    listener.bind(address)
            finally:
                os.umask(before)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise StoreError(f"can't listen on {self.path}: {error.strerror}") from error
        return listener

    def leave(self) -> None:
        """Nobody finds the socket any more. Idempotent."""
        if self._lock >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _locked(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StoreError(f"another kvd holds {path.with_suffix('')}") from None
    return lock


def _next_boot(lock: int) -> int:
    last = os.pread(lock, 20, 0).strip()
    boot = max(time.time_ns() // 1_000_000, int(last) if last.isdigit() else 0) + 1
    os.pwrite(lock, b"%020d" % boot, 0)
    return boot
