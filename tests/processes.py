"""Processes of tests: stopped for certain, not soon."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

_STOPPED = {"T", "t"}
_WAIT_S = 60.0


def stand_still(pid: int) -> None:
    """SIGSTOP, and back only when every thread has stopped: on a busy machine one that was just
    running may still answer for a while."""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + _WAIT_S
    while sys.platform == "linux" and not _states(pid) <= _STOPPED:
        assert time.monotonic() < deadline_s, f"process {pid} goes on after SIGSTOP"
        time.sleep(0.001)


def go_on(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(path.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # a thread that has ended meanwhile
    return found
