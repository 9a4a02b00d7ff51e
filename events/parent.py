"""Ending with one's parent: the kernel signals a process whose parent has died (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Get SIGTERM when `parent` (our parent's pid as seen at start) dies, also if it has already.

    The kernel means the thread that started us: that thread must live as long as the parent.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the parent can't be watched")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


_EXEC = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs before the program, in its process: PR_SET_PDEATHSIG = SIGKILL survives the exec."""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command of a foreign program, so that it is killed when the thread that starts it ends.

    `command[0]` is a path. A program of ours calls follow_parent instead, and ends tidily.
    """
    return [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command]
