"""The arena's memory: one mapping, the first part a table of generations, the rest slots.

A reader looks a slot's generation up before and after it copies: another number means that the
bytes may not be those that it was promised. Only the arena's owner writes the table. A shared one
is a memfd: it has no name, so nothing is left when the last process that maps it has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.arena.available import available_bytes
from kvstore.arena.prefault import Prefault
from kvstore.errors import StoreError

UNIT_BYTES = 4_096
"""Slots begin at multiples of this; each unit has a place in the table."""
_TABLE_ITEM_BYTES = 8

Bytes = NDArray[np.uint8]


def round_up(size: int, unit: int = UNIT_BYTES) -> int:
    """To a whole number of units."""
    return -(-size // unit) * unit


class Segment:
    """`slot_bytes` bytes for slots; offsets count from the first of them."""

    def __init__(self, slot_bytes: int, fd: int | None, keep_fd: bool = True) -> None:
        """Maps `fd`, which stays the caller's where this raises, or memory of this process alone.

        Raises StoreError when the file is smaller than it must be.
        """
        self.slot_bytes = slot_bytes
        self._table_bytes = round_up(slot_bytes // UNIT_BYTES * _TABLE_ITEM_BYTES)
        total = self._table_bytes + slot_bytes
        if slot_bytes <= 0 or slot_bytes % UNIT_BYTES:
            raise StoreError(f"an arena's size is a multiple of {UNIT_BYTES} bytes")
        if fd is not None and os.fstat(fd).st_size != total:
            raise StoreError("the arena's memory is not as large as it was said to be")
        self._map = mmap.mmap(-1 if fd is None else fd, total)
        self.fd = fd if keep_fd else None
        raw: Bytes = np.frombuffer(self._map, np.uint8)
        self._generations = raw[: self._table_bytes].view(np.uint64)
        self._slots = raw[self._table_bytes :]
        self._prefault = Prefault(self._slots)

    @classmethod
    def shared(cls, slot_bytes: int) -> Segment:
        """New memory whose `fd` other processes can map. Raises StoreError when there is too
        little: all of it is taken now, since running out later would be a SIGBUS for a user."""
        size = round_up(slot_bytes // UNIT_BYTES * _TABLE_ITEM_BYTES) + slot_bytes
        available = available_bytes()
        if available is not None and size > available:
            # Taking it regardless would have the kernel end processes, ours or others.
            raise StoreError(f"no {size} bytes for the arena: {available} are available")
        fd = os.memfd_create("warmroute-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            # Nobody can make it smaller under the others' feet.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(slot_bytes, fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise StoreError(f"no {slot_bytes} bytes of memory for the arena: {error}") from error

    @classmethod
    def private(cls, slot_bytes: int) -> Segment:
        """New memory of this process alone."""
        return cls(slot_bytes, None)

    @classmethod
    def attached(cls, fd: int, slot_bytes: int) -> Segment:
        """The memory of another process. `fd` is closed, whatever happens: the mapping keeps the
        memory. Raises StoreError."""
        try:
            return cls(slot_bytes, fd, keep_fd=False)
        except (OSError, ValueError) as error:
            raise StoreError(f"the arena's memory can't be mapped: {error}") from error
        finally:
            os.close(fd)

    def slot(self, offset: int, size: int) -> Bytes:
        """The bytes of one slot, about to be used. Raises ValueError outside of the arena."""
        if not 0 <= offset <= offset + size <= self.slot_bytes:
            raise ValueError("a slot outside of the arena")
        self._prefault.touch(offset, size)
        return self._slots[offset : offset + size]

    def generation(self, offset: int) -> int:
        """Whose bytes lie there now; 0 for nobody's."""
        return int(self._generations[offset // UNIT_BYTES])

    def stamp(self, offset: int, generation: int) -> None:
        """Says whose bytes lie there from now on. The arena's owner alone does this."""
        self._generations[offset // UNIT_BYTES] = generation

    def close(self) -> None:
        """Unmaps it once the last view is gone, and closes the file. Idempotent."""
        empty: Bytes = np.empty(0, np.uint8)
        self._generations, self._slots = empty.view(np.uint64), empty
        self._prefault = Prefault(empty)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
