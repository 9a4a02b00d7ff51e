"""What the replica's readers may believe of its cache: resident keys, their digest, its numbering.

Built from the engine's journal alone. Pure state: no bus, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

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


class Residency:
    """The set of resident keys, exactly, and the digest of it at (generation, seq).

    `journal_faults` counts facts that contradict the ones before: a key stored twice, or removed
    without being there. The set stays right all the same.
    """

    def __init__(self, shape: DigestShape, bound: float = FALSE_POSITIVE_BOUND) -> None:
        self.generation = 1
        self.seq = 0
        self.journal_faults = 0
        self._bound = bound
        self._keys: set[bytes] = set()
        self._digest = CountingDigest(shape)
        self._frozen: FrozenDigest | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def shape(self) -> DigestShape:
        """Of the current generation."""
        return self._digest.shape

    @property
    def false_positive_rate(self) -> float:
        """Of one absent key, from the actual fill."""
        return self._digest.false_positive_rate

    def apply(self, facts: Iterable[CacheFact]) -> list[Numbered]:
        """Take facts in commit order; returns the deltas that tell of their net effect.

        An empty list with a new generation means that readers need a snapshot.
        """
        gained, lost = self._net_change(facts)
        if not gained and not lost:
            return []
        self._keys -= lost
        self._keys |= gained
        if self._keys:
            self._digest.remove(halves_of(lost))
            self._digest.store(halves_of(gained))
        else:
            self._digest.clear()
        return [] if self._rebuilt_if_full() else self._number()

    def freeze(self) -> FrozenDigest:
        """The digest as told so far; the same object until the next delta."""
        if self._frozen is None:
            bits = self._digest.snapshot()
            self._frozen = FrozenDigest.of(self.generation, self.seq, self.shape, bits)
        return self._frozen

    def _net_change(self, facts: Iterable[CacheFact]) -> tuple[set[bytes], set[bytes]]:
        gained: set[bytes] = set()
        lost: set[bytes] = set()
        for op, key in facts:
            if op is CacheOp.CLEARED:
                gained, lost = set(), set(self._keys)
            elif (op is CacheOp.STORED) is self._resident(key, gained, lost):
                self.journal_faults += 1
            elif op is CacheOp.STORED:
                (lost.discard if key in lost else gained.add)(key)
            else:
                (gained.discard if key in gained else lost.add)(key)
        return gained, lost

    def _resident(self, key: bytes, gained: set[bytes], lost: set[bytes]) -> bool:
        return key in gained or (key in self._keys and key not in lost)

    def _number(self) -> list[Numbered]:
        deltas = split_delta(*self._digest.take_delta())
        first = self.seq + 1
        self.seq += len(deltas)
        self._frozen = None
        return list(enumerate(deltas, first))

    def _rebuilt_if_full(self) -> bool:
        if self._digest.false_positive_rate <= self._bound:
            return False
        shape = fitting_shape(self.shape, len(self._keys), self._bound)
        if shape == self.shape and not self._digest.stuck:
            return False
        self._digest = CountingDigest.grown(shape, halves_of(self._keys))
        self.generation += 1
        self.seq = 0
        self._frozen = None
        return True
