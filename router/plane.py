"""Digests of many replicas as bit planes: one lookup answers for all of them.

Rows are bit positions, columns are replicas, 64 to a word. The AND over the rows of one block's
positions tells who holds it. Knows digests only: no loads, no trust, no tokens.
"""

from __future__ import annotations

import numpy as np

from events.digest import positions
from events.load import DigestShape

COLUMNS_PER_WORD = 64
FIRST_SCAN_BLOCKS = 64
_ONE = np.uint64(1)


class Plane:
    """Digests of replicas that share one shape.

    A column is *unknown* from its addition, or from a gap, until a whole digest arrives: it then
    counts as empty, and `known` says so.
    """

    def __init__(self, shape: DigestShape) -> None:
        self.shape = shape
        self._rows = np.zeros((shape.bits, 1), np.uint64)
        self._columns: dict[str, int] = {}
        self._owners: list[str | None] = [None] * COLUMNS_PER_WORD
        self._known = np.zeros(1, np.uint64)

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
        word, bit = self._at(replica)
        column = np.unpackbits(bits.astype(np.uint8, copy=False), bitorder="little")
        rows = self._rows[:, word]
        rows &= ~bit
        rows |= column.astype(np.uint64) * bit
        self._known[word] |= bit

    def apply(self, replica: str, set_positions: np.ndarray, clear_positions: np.ndarray) -> None:
        """Absolute changes of a known column. Raises ValueError on positions outside the shape."""
        word, bit = self._at(replica)
        for changed in (set_positions, clear_positions):
            if changed.size and int(changed.max()) >= self.shape.bits:
                raise ValueError("a position outside the digest")
        self._rows[clear_positions, word] &= ~bit
        self._rows[set_positions, word] |= bit

    def known(self, replica: str) -> bool:
        """Whether the column holds a whole digest."""
        word, bit = self._at(replica)
        return bool(self._known[word] & bit)

    def fill(self, replica: str) -> float:
        """The share of set bits."""
        word, bit = self._at(replica)
        return float(np.count_nonzero(self._rows[:, word] & bit)) / self.shape.bits

    def depths(self, halves: np.ndarray) -> dict[str, int]:
        """Leading blocks held, for each known replica; `halves` is uint64 (blocks, 2).

        Every block from the first one on is probed, so a false positive can lengthen a match only
        by what follows its true end without a gap: by j blocks with probability fpr**j.
        """
        depths = dict.fromkeys(self._known_replicas(), 0)
        alive, start, step = self._known, 0, FIRST_SCAN_BLOCKS
        while start < len(halves) and alive.any():
            stop = min(start + step, len(halves))
            held = self._held(halves[start:stop], alive)
            self._credit(held, alive, start, depths)
            alive, start, step = held[-1], stop, 2 * step
        for column in _set_bits(alive):
            depths[self._owner(column)] = len(halves)
        return depths

    def _held(self, halves: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """uint64 (blocks, words): who holds this block and all before it."""
        probes = self._rows[positions(halves, self.shape)]
        blocks = np.bitwise_and.reduce(probes, axis=1)
        blocks[0] &= alive
        return np.bitwise_and.accumulate(blocks, axis=0, out=blocks)

    def _credit(
        self, held: np.ndarray, alive: np.ndarray, start: int, depths: dict[str, int]
    ) -> None:
        """Write down the depth of each column that ends within `held`."""
        changes = np.flatnonzero((held[1:] != held[:-1]).any(axis=1)) + 1
        before = alive
        for index in (0, *changes.tolist()):
            for column in _set_bits(before & ~held[index]):
                depths[self._owner(column)] = start + index
            before = held[index]

    def _owner(self, column: int) -> str:
        owner = self._owners[column]
        assert owner is not None, "a known column has an owner"
        return owner

    def _known_replicas(self) -> list[str]:
        return [self._owner(column) for column in _set_bits(self._known)]

    def _at(self, replica: str) -> tuple[int, np.uint64]:
        word, bit = divmod(self._columns[replica], COLUMNS_PER_WORD)
        return word, _ONE << np.uint64(bit)

    def _grow(self) -> None:
        rows = np.zeros((self.shape.bits, self._rows.shape[1] + 1), np.uint64)
        rows[:, :-1] = self._rows
        self._rows = rows
        self._known = np.append(self._known, np.uint64(0))
        self._owners += [None] * COLUMNS_PER_WORD


def _set_bits(words: np.ndarray) -> list[int]:
    """Numbers of the set bits, counted through all words."""
    columns: list[int] = []
    for word, value in enumerate(words.tolist()):
        while value:
            lowest = value & -value
            columns.append(word * COLUMNS_PER_WORD + lowest.bit_length() - 1)
            value ^= lowest
    return columns
