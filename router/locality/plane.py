"""Digests of many replicas as bit planes: one lookup answers for all of them.

Rows are bit positions, columns are replicas, 64 to a word. The AND over the rows of one block's
positions tells who holds it. Knows digests only: no loads, no trust, no tokens.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import numpy as np

from events.digest import positions
from events.load import DigestShape
from router.locality.planes import at, plane_kernels

COLUMNS_PER_WORD = 64
FILL_SAMPLE = 8_192
"""Bits that are looked at to tell how full a column is."""


class Plane:
    """Digests of replicas that share one shape.

    A column is *unknown* from its addition, or from a gap, until a whole digest arrives: it then
    counts as empty, and `known` says so.
    """

    def __init__(self, shape: DigestShape) -> None:
        self.shape = shape
        self._kernels = plane_kernels()
        self._rows = _zeros(shape.bits, 1)
        self._columns: dict[str, int] = {}
        self._owners: list[str | None] = [None] * COLUMNS_PER_WORD
        self._known = np.zeros(1, np.uint64)
        self._search = self._kernels.search(self._rows, shape, self._known)

    def __contains__(self, replica: str) -> bool:
        return replica in self._columns

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def nbytes(self) -> int:
        """Memory of the planes."""
        return self._rows.nbytes

    @property
    def growth_bytes(self) -> int:
        """What one more column would cost."""
        return 0 if None in self._owners else 8 * self.shape.bits

    def replicas(self) -> list[str]:
        """Owners of the columns."""
        return list(self._columns)

    def add(self, replica: str) -> None:
        """Give the replica a column, unknown at first; nothing happens when it has one."""
        if replica in self._columns:
            return
        if None not in self._owners:
            self._grow()
        column = self._owners.index(None)
        self._owners[column] = replica
        self._columns[replica] = column

    def remove(self, replica: str) -> None:
        """Clear the column and free it."""
        if replica in self._columns:
            self.forget(replica)
            self._owners[self._columns.pop(replica)] = None

    def forget(self, replica: str) -> None:
        """The replica's digest is unknown from now on: the column is cleared."""
        word, bit = self._at(replica)
        self._rows[:, word] &= ~bit
        self._known[word] &= ~bit

    def reset(self, replica: str, bits: np.ndarray) -> None:
        """Put a whole digest in place: uint8 of shape (shape.bits // 8,), little bit order.

        Raises ValueError on another length."""
        if bits.shape != (self.shape.bits // 8,):
            raise ValueError("a digest of another size than its shape says")
        column = self._columns[replica]
        self._kernels.reset(self._rows, column, bits)
        word, bit = at(column)
        self._known[word] |= bit

    def apply(self, replica: str, set_positions: np.ndarray, clear_positions: np.ndarray) -> None:
        """Absolute changes of a known column. Raises ValueError on positions outside the shape."""
        column = self._columns[replica]
        for changed in (set_positions, clear_positions):
            if changed.size and int(changed.max()) >= self.shape.bits:
                raise ValueError("a position outside the digest")
        self._kernels.change(self._rows, column, clear_positions, False)
        self._kernels.change(self._rows, column, set_positions, True)

    def known(self, replica: str) -> bool:
        """Whether the column holds a whole digest."""
        word, bit = self._at(replica)
        return bool(self._known[word] & bit)

    def fill(self, replica: str) -> float:
        """The share of set bits, from a sample: keys' positions are as good as random."""
        word, bit = self._at(replica)
        sample = self._rows[:: max(1, self.shape.bits // FILL_SAMPLE), word]
        return float(np.count_nonzero(sample & bit)) / len(sample)

    def holds(self, replica: str, halves: np.ndarray) -> np.ndarray:
        """Whether one known replica seems to hold these blocks, one by one: bool (blocks,)."""
        word, bit = self._at(replica)
        return np.all(self._rows[positions(halves, self.shape), word] & bit, axis=1)

    def claimed(self, halves: np.ndarray) -> dict[str, int]:
        """How many of these blocks each known replica seems to hold, one by one."""
        held = np.bitwise_and.reduce(self._rows[positions(halves, self.shape)], axis=1)
        bits = np.unpackbits(held.astype("<u8").view(np.uint8), axis=1, bitorder="little")
        counts = bits.sum(axis=0).tolist()
        return {
            replica: counts[column]
            for replica, column in self._columns.items()
            if self.known(replica)
        }

    def columns(self) -> Iterable[tuple[str, int]]:
        """Owners, and the numbers of their columns."""
        return self._columns.items()

    @property
    def look_up_at(self) -> tuple[int, ...]:
        """What a native kernel looks up with, until a column is added: see planes.py; empty
        without one."""
        return self._search.at

    def column_depths(self, keys: bytes) -> np.ndarray:
        """Leading blocks held by column, and 0 at `NOBODY`: int32; 0 where it is unknown. Good
        until it is asked again. `keys` are the chain's, back to back."""
        return self._search(keys)

    def depths(self, halves: np.ndarray) -> dict[str, int]:
        """The same for each known replica by name."""
        found = self.column_depths(np.asarray(halves, "<u8").tobytes()).tolist()
        return {
            replica: found[column]
            for replica, column in self._columns.items()
            if self.known(replica)
        }

    def _at(self, replica: str) -> tuple[int, np.uint64]:
        return at(self._columns[replica])

    def _grow(self) -> None:
        rows = _zeros(self.shape.bits, self._rows.shape[1] + 1)
        rows[:, :-1] = self._rows
        self._rows = rows
        self._known = np.append(self._known, np.uint64(0))
        self._owners += [None] * COLUMNS_PER_WORD
        self._search = self._kernels.search(self._rows, self.shape, self._known)


def _zeros(bits: int, words: int) -> np.ndarray:
    """uint64 (bits, words) on pages of its own: large ones where the system has them, since a
    look-up jumps all over the plane, and a row of 512 replicas is just one cache line."""
    pages = mmap.mmap(-1, 8 * bits * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64).reshape(bits, words)
