"""Ending with one's parent: the kernel signals a process whose parent has died (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
