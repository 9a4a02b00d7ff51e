"""A real daemon for tests, and a nursery of real users that are there to be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from kvstore.kvd.client import Kvd
from kvstore.kvd.messages import Report

SOON_S = 60.0
MIB = 1 << 20


class Daemon:
    """`python -m kvstore.kvd`, started and stopped at will at one path."""

    def __init__(self, path: Path, mib: int = 16) -> None:
        self.path = path
        self._bytes = mib * MIB
        self._process: subprocess.Popen[str] | None = None
        self._control = Kvd(path, "test")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "kvstore.kvd", "--socket", str(self.path)]
        self._process = subprocess.Popen(
            [*command, "--bytes", str(self._bytes), "--tenant-share", "1", "--die-with-parent"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"READY unix:{self.path}\n"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        status = self._process.wait(SOON_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def report(self) -> Report:
        """Asked in a session of its own, which counts in it."""
        deadline = time.monotonic() + SOON_S
        control = self._control.connect("report", deadline)
        try:
            return control.report(deadline)
        finally:
            control.close()

    def wait_idle(self, within_s: float) -> float:
        """Until nothing is written or leased and nobody else is there; how long that took."""
        began = time.monotonic()
        while True:
            stats = self.report().stats
            took = time.monotonic() - began
            held = stats.writing + stats.leased + stats.quarantined + stats.dying
            if not held and stats.sessions == 1:
                return took
            assert took < within_s, stats

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)


NURSERY = """
import os, signal, sys
from pathlib import Path
from tests.kvstore.kvd.victims import VICTIMS
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    kind, seed = line.split()
    if os.fork() == 0:
        try:
            VICTIMS[kind](Path(sys.argv[1]), int(seed))
        finally:
            os._exit(1)
"""


class Nursery:
    """One process that forks users of the daemon: a fresh interpreter for each takes too long."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def born(self, kind: str, seed: int) -> int:
        """The pid of a user that has said that it is at work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind} {seed}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(SOON_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
