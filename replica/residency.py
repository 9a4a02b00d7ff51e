"""What the replica's readers may believe of its cache: resident keys, their digest, its numbering.

Built from the engine's journal, and from what the tiers below the device confirmed. Pure state: no
bus, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from events.cache import CacheFact, CacheOp
from events.digest import (
    CountingDigest,
    DigestDelta,
    fitting_shape,
    halves_of,
    split_delta,
)
from events.load import DigestShape
from events.snapshot import FrozenDigest

FALSE_POSITIVE_BOUND = 0.001
"""Per key asked; beyond it the digest is rebuilt with more bits."""

Numbered = tuple[int, DigestDelta]
"""(seq, delta)."""


class _Column:
    """The resident keys of one column, exactly, and their counting digest."""

    def __init__(self, shape: DigestShape) -> None:
        self.keys: set[bytes] = set()
        self.digest = CountingDigest(shape)
        self.faults = 0

    def apply(self, facts: Iterable[CacheFact]) -> None:
        gained, lost = self._net_change(facts)
        if not gained and not lost:
            return
        self.keys -= lost
        self.keys |= gained
        if self.keys:
            self.digest.remove(halves_of(lost))
            self.digest.store(halves_of(gained))
        else:
            self.digest.clear()

    def rebuild(self, shape: DigestShape) -> None:
        self.digest = CountingDigest.grown(shape, halves_of(self.keys))

    def _net_change(self, facts: Iterable[CacheFact]) -> tuple[set[bytes], set[bytes]]:
        gained: set[bytes] = set()
        lost: set[bytes] = set()
        for op, key in facts:
            if op is CacheOp.CLEARED:
                gained, lost = set(), set(self.keys)
            elif (op is CacheOp.STORED) is self._resident(key, gained, lost):
                self.faults += 1
            elif op is CacheOp.STORED:
                (lost.discard if key in lost else gained.add)(key)
            else:
                (gained.discard if key in gained else lost.add)(key)
        return gained, lost

    def _resident(self, key: bytes, gained: set[bytes], lost: set[bytes]) -> bool:
        return key in gained or (key in self.keys and key not in lost)


class Residency:
    """The sets of resident keys, one of each column, and the digest of them at (generation, seq).

    `journal_faults` counts facts that contradict the ones before: a key stored twice, or removed
    without being there. The sets stay right all the same.
    """

    def __init__(self, shape: DigestShape, bound: float = FALSE_POSITIVE_BOUND) -> None:
        self.generation = 1
        self.seq = 0
        self.shape = shape
        self._bound = bound
        self._columns = [_Column(shape.column) for _ in range(shape.columns)]
        self._frozen: FrozenDigest | None = None

    def __len__(self) -> int:
        """Keys on the device."""
        return len(self._columns[0].keys)

    @property
    def journal_faults(self) -> int:
        """Of all columns."""
        return sum(column.faults for column in self._columns)

    @property
    def false_positive_rate(self) -> float:
        """Of one absent key in the fullest column, from the actual fill."""
        return max(column.digest.false_positive_rate for column in self._columns)

    def apply(self, *facts: Iterable[CacheFact]) -> list[Numbered]:
        """Take facts in commit order, those of each column; returns the deltas that tell of their
        net effect.

        An empty list with a new generation means that readers need a snapshot.
        """
        for column, news in zip(self._columns, facts, strict=False):
            column.apply(news)
        if self._rebuilt_if_full():
            return []
        became_set, became_clear = self._take_delta()
        if not became_set.size and not became_clear.size:
            return []
        return self._number(split_delta(became_set, became_clear))

    def freeze(self) -> FrozenDigest:
        """The digest as told so far; the same object until the next delta."""
        if self._frozen is None:
            bits = np.concatenate([column.digest.snapshot() for column in self._columns])
            self._frozen = FrozenDigest.of(self.generation, self.seq, self.shape, bits)
        return self._frozen

    def _take_delta(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions counted through all columns."""
        deltas = [column.digest.take_delta() for column in self._columns]
        if len(deltas) == 1:
            return deltas[0]
        size = self.shape.bits
        became = [
            [np.uint32(place * size) + delta[way] for place, delta in enumerate(deltas)]
            for way in (0, 1)
        ]
        return np.concatenate(became[0]), np.concatenate(became[1])

    def _number(self, deltas: list[DigestDelta]) -> list[Numbered]:
        first = self.seq + 1
        self.seq += len(deltas)
        self._frozen = None
        return list(enumerate(deltas, first))

    def _rebuilt_if_full(self) -> bool:
        if self.false_positive_rate <= self._bound:
            return False
        most = max(len(column.keys) for column in self._columns)
        shape = fitting_shape(self.shape, most, self._bound)
        if shape == self.shape and not any(column.digest.stuck for column in self._columns):
            return False
        for column in self._columns:
            column.rebuild(shape.column)
        self.shape = shape
        self.generation += 1
        self.seq = 0
        self._frozen = None
        return True
