"""The inner loops over digest planes: native where a compiler is there, else their NumPy twin.

Both do exactly the same, which a test holds them to. Rows are uint64 (bits, words): bit positions
by replicas, 64 to a word; a column's number counts through the words of a row.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from configs.native import CompileError, NativeSource, address, declare, load_object
from events.digest import positions
from events.load import DigestShape
from kvstore.identity import KEY_BYTES

log = logging.getLogger(__name__)

KERNELS = NativeSource("planes", Path(__file__).parent, ("planes.cpp",))

NOBODY = -1
"""The place of a depth that belongs to no column."""

HEAD_BLOCKS = 16
"""Looked at one by one: most replicas part here, and here a digest's error counts most."""
WINDOW_BLOCKS = 3
"""Blocks in a row that must look held before the depth that the bisection behind the head ends at:
one false positive on its way overshoots by half of what was left."""


class Search(NamedTuple):
    """A look-up in some rows. `at`: the native function, and what it is called with but for the
    keys (see router/choice/survey.cpp); empty without one. `kept`: what must stay for it."""

    look_up: Callable[[bytes], np.ndarray]
    at: tuple[int, ...] = ()
    kept: tuple[np.ndarray, ...] = ()

    def __call__(self, keys: bytes) -> np.ndarray:
        return self.look_up(keys)


class PlaneKernels(Protocol):
    """The loops. Arrays are contiguous; positions lie within the rows."""

    def search(self, rows: np.ndarray, shape: DigestShape, known: np.ndarray) -> Search:
        """A look-up in these rows, which must stay where they are: from a chain's keys back to back
        to the leading blocks held, int32 (64 * words + 1,), for the columns of `known` (uint64
        (words,)), 0 for all others and at `NOBODY`. The answer is good until the next one.

        Holding a block means holding all before it: behind the head the search bisects."""

    def change(self, rows: np.ndarray, column: int, spots: np.ndarray, to: bool) -> None:
        """Set or clear a column's bits at `spots` (uint32)."""

    def reset(self, rows: np.ndarray, column: int, bits: np.ndarray) -> None:
        """Put a whole column in place: uint8 (bits // 8,), little bit order."""


class NativeKernels:
    """Compiled from planes.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def search(self, rows: np.ndarray, shape: DigestShape, known: np.ndarray) -> Search:
        words = rows.shape[1]
        found = np.zeros(64 * words + 1, np.int32)
        function = self._library.wr_depths
        # To ask for an address takes as long as a short look-up.
        first = (address(rows), words, shape.bits, shape.k)
        rest = (address(known), HEAD_BLOCKS, WINDOW_BLOCKS, address(found))

        def look_up(keys: bytes) -> np.ndarray:
            found.fill(0)
            function(*first, keys, len(keys) // KEY_BYTES, *rest)
            return found

        code = ctypes.cast(function, ctypes.c_void_p).value
        assert code is not None
        return Search(look_up, (code, *first, *rest), (rows, known, found))

    def change(self, rows: np.ndarray, column: int, spots: np.ndarray, to: bool) -> None:
        spots = np.ascontiguousarray(spots, np.uint32)
        self._library.wr_change(
            address(rows), rows.shape[1], column, address(spots), spots.size, to
        )

    def reset(self, rows: np.ndarray, column: int, bits: np.ndarray) -> None:
        bits = np.ascontiguousarray(bits, np.uint8)
        self._library.wr_reset(address(rows), rows.shape[1], column, address(bits), rows.shape[0])


class NumpyKernels:
    """The same without a compiler."""

    def search(self, rows: np.ndarray, shape: DigestShape, known: np.ndarray) -> Search:
        def look_up(keys: bytes) -> np.ndarray:
            halves = np.frombuffer(keys, "<u8").reshape(-1, 2)
            return self._depths(rows, shape, halves, known)

        return Search(look_up)

    def _depths(
        self, rows: np.ndarray, shape: DigestShape, halves: np.ndarray, known: np.ndarray
    ) -> np.ndarray:
        found = np.zeros(64 * rows.shape[1] + 1, np.int32)
        scanned = min(HEAD_BLOCKS, len(halves))
        alive = known
        for block, held in enumerate(_holders(rows, shape, halves[:scanned])):
            found[_columns(alive & ~held)] = block
            alive = alive & held
        todo = [(scanned, len(halves), alive)]
        while todo:
            low, high, alive = todo.pop()
            if not alive.any():
                continue
            if low == high:
                last = halves[max(scanned, low - WINDOW_BLOCKS) : low]
                sure = alive & np.bitwise_and.reduce(_holders(rows, shape, last), axis=0)
                found[_columns(sure)] = low
                todo.append((scanned, low - 1, alive & ~sure))
                continue
            middle = low + (high - low) // 2
            deeper = alive & _holders(rows, shape, halves[middle : middle + 1])[0]
            todo += [(low, middle, alive & ~deeper), (middle + 1, high, deeper)]
        return found

    def change(self, rows: np.ndarray, column: int, spots: np.ndarray, to: bool) -> None:
        word, bit = at(column)
        if to:
            rows[spots, word] |= bit
        else:
            rows[spots, word] &= ~bit

    def reset(self, rows: np.ndarray, column: int, bits: np.ndarray) -> None:
        word, bit = at(column)
        rows[:, word] &= ~bit
        rows[:, word] |= np.unpackbits(bits, bitorder="little").astype(np.uint64) * bit


def at(column: int) -> tuple[int, np.uint64]:
    """The column's word, and its bit there."""
    word, bit = divmod(column, 64)
    return word, np.uint64(1 << bit)


def _holders(rows: np.ndarray, shape: DigestShape, halves: np.ndarray) -> np.ndarray:
    """uint64 (blocks, words): who holds each block."""
    return np.bitwise_and.reduce(rows[positions(halves, shape)], axis=1)


def _columns(words: np.ndarray) -> np.ndarray:
    """Numbers of the set bits, counted through all words."""
    return np.flatnonzero(np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little"))


def native_planes() -> PlaneKernels:
    """Compiled from planes.cpp. Raises CompileError."""
    pointer, long, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    signatures = {
        "wr_depths": [pointer] + [long] * 3 + [pointer, long, pointer] + [long] * 2 + [pointer],
        "wr_change": [pointer, long, long, pointer, long, flag],
        "wr_reset": [pointer, long, long, pointer, long],
    }
    return NativeKernels(declare(load_object(KERNELS, quick=True), signatures))


@cache
def plane_kernels() -> PlaneKernels:
    """The fastest there are here; compiles them at the first call on a machine."""
    try:
        return native_planes()
    except CompileError as error:
        log.warning("no native index, NumPy looks prefixes up: %s", error)
        return NumpyKernels()


if __name__ == "__main__":
    plane_kernels()
