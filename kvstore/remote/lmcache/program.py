"""The sidecar as a child of ours: started when it is needed, started again when it has ended."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Lock

from events.parent import dying_with_us
from kvstore.errors import StoreError
from kvstore.remote.lmcache import sidecar
from kvstore.stream import left_s

PROGRAM = Path(sidecar.__file__)
STOP_S = 2.0


class Program:
    """Threads may share it. `python` is the interpreter of an environment that has lmcache."""

    def __init__(self, python: Path, server: str, http_port: int) -> None:
        """Raises StoreError when there is no such interpreter."""
        if not os.access(python, os.X_OK):
            raise StoreError(f"no Python at {python}: give one that has lmcache, ?python=PATH")
        self._command = [str(python), "-I", str(PROGRAM), "--server", server]
        self._command += ["--http-port", str(http_port)]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._closed = False

    def session(self, deadline: float) -> socket.socket:
        """One end of a new pair, whose other end the sidecar has. Raises OSError, TimeoutError
        while it is still starting, or others wait for it until then."""
        if not self._lock.acquire(timeout=left_s(deadline)):
            raise TimeoutError("the sidecar is starting")
        try:
            return self._session(deadline)
        finally:
            self._lock.release()

    def _session(self, deadline: float) -> socket.socket:
        control = self._running()
        self._await_ready(control, deadline)
        ours, theirs = socket.socketpair()
        try:
            control.settimeout(left_s(deadline))
            socket.send_fds(control, [b"s"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def start(self) -> None:
        """Returns at once; it takes seconds until it can work."""
        with self._lock:
            self._running()

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends it. Idempotent."""
        with self._lock:
            self._closed = True
            self._stop()

    def _running(self) -> socket.socket:
        if self._closed:
            raise ConnectionError("closed")
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._stop()
            self._spawn()
        assert self._control is not None
        return self._control

    def _spawn(self) -> None:
        self._control, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                dying_with_us([*self._command, "--control-fd", str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"},
            )
        finally:
            theirs.close()

    def _await_ready(self, control: socket.socket, deadline: float) -> None:
        if self._ready:
            return
        if not select.select([control], [], [], left_s(deadline))[0]:
            raise TimeoutError("the sidecar is starting")
        if control.recv(1) != sidecar.READY:
            self._stop()
            raise ConnectionError("the sidecar has ended: does its Python have lmcache?")
        self._ready = True

    def _stop(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        self._ready = False
        if control is not None:
            control.close()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
                return
            process.kill()
            process.wait()
