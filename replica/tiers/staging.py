"""Memory of this process alone: loaded blocks are checked there, blocks to write gathered there.

No other process maps it, so what was checked there stays as it was. A fixed number of slots, one
block each: that bounds the bytes under way.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from contextlib import suppress
from threading import Condition

PAGE_BYTES = mmap.PAGESIZE


class Staging:
    """Slots with ids 0 to slots - 1. Threads share it."""

    def __init__(self, slots: int, payload_bytes: int) -> None:
        self.slots = slots
        self._payload_bytes = payload_bytes
        self._stride_bytes = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, slots * self._stride_bytes, flags=private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer faults at the first use of each slot, fewer misses of the TLB at the later ones.
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._free = list(range(slots))
        self._changed = Condition()

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def buffer(self, slot: int) -> memoryview:
        """The slot's memory, one payload long; only for whoever took the slot."""
        start = slot * self._stride_bytes
        return memoryview(self._memory)[start : start + self._payload_bytes]

    def take(self, most: int, deadline: float, spare: int = 0) -> list[int]:
        """At least one slot and at most `most`, leaving `spare` free ones; none when it is late."""
        with self._changed:
            timeout_s = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._free) > spare, timeout_s):
                return []
            count = min(most, len(self._free) - spare)
            return [self._free.pop() for _ in range(count)]

    def give(self, slots: Iterable[int]) -> None:
        """Back, each once."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()
