"""Maps memory before it is copied to: one call for many pages in place of a fault for each.

The pages of an arena are taken at its start; what a first touch costs is their entries in a
process's own page tables, one fault per 4 KiB, which takes longer than the copy.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from numpy.typing import NDArray

from configs.native import address

STEP_BYTES = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): where memory is lacking it fails, without a signal."""


class Prefault:
    """Of `memory`, which begins at a page, step by step as it is used. Threads may share it: to map
    what is mapped does nothing."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._mapped = bytearray(-(-len(memory) // STEP_BYTES))
        self._madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

    def touch(self, offset: int, size: int) -> None:
        """These bytes will be used now. Best effort: what is not mapped here a fault will map."""
        if self._madvise is None or not size:
            return
        last = (offset + size - 1) // STEP_BYTES + 1
        while (step := self._mapped.find(0, offset // STEP_BYTES, last)) >= 0:
            part = self._memory[step * STEP_BYTES : (step + 1) * STEP_BYTES]
            self._madvise(ctypes.c_void_p(address(part)), len(part), _POPULATE_WRITE)
            self._mapped[step] = 1
