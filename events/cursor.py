"""Where a reader stands in one replica's digest: which delta comes next, or that it lost the way.

Pure state, no bus and no clock. Deltas that can't be used yet are held, within a bound, until a
snapshot says where to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np

from events.digest import DigestDelta
from events.snapshot import FrozenDigest

MAX_HELD_DELTAS = 1_024
MAX_HELD_BYTES = 4 * 1024 * 1024

Change = tuple[int, np.ndarray, np.ndarray]
"""(seq, set positions, clear positions)."""


class Verdict(Enum):
    """What a delta is to this cursor.

    NEXT: apply it. OLD: seen, or of a former generation. GAP: something before it is missing.
    HELD: kept for after the snapshot.
    """

    NEXT = "next"
    OLD = "old"
    GAP = "gap"
    HELD = "held"


class Cursor:
    """The position (generation, seq) of the last applied delta, and whether it is trusted."""

    __slots__ = ("_held", "_held_bytes", "bits", "generation", "known", "seq")

    def __init__(self) -> None:
        self.generation = 0
        self.seq = 0
        self.bits = 0
        self.known = False
        self._held: dict[tuple[int, int], DigestDelta] = {}
        self._held_bytes = 0

    def accept(self, generation: int, seq: int, delta: DigestDelta) -> Verdict:
        """Judge a delta. After NEXT the cursor stands on it; after GAP it is unknown."""
        at = (generation, seq)
        if at <= (self.generation, self.seq) or at in self._held:
            return Verdict.OLD
        if self.known and at == (self.generation, self.seq + 1):
            self.seq = seq
            return Verdict.NEXT
        if self.known:
            # Not held: whoever sent it will answer the coming snapshot request later than that.
            self.known = False
            return Verdict.GAP
        self._hold(at, delta)
        return Verdict.HELD

    def behind(self, generation: int, seq: int) -> bool:
        """Whether the replica says that it has told more than this cursor has seen."""
        return (generation, seq) > (self.generation, self.seq)

    def lose(self) -> None:
        """Something may be missing: only a snapshot helps."""
        self.known = False

    def restore(self, frozen: FrozenDigest) -> None:
        """Stand on a snapshot; then `followers` gives what was held for behind it."""
        self.generation, self.seq = frozen.generation, frozen.seq
        self.bits = frozen.shape.total_bits
        self.known = True

    def followers(self) -> Iterator[Change]:
        """Held deltas that follow without a hole, the cursor moving along.

        A hole leaves the cursor unknown; what lies behind it is dropped, because the next snapshot
        will be newer. Raises WireError on bad positions.
        """
        while (delta := self._held.pop((self.generation, self.seq + 1), None)) is not None:
            self.seq += 1
            yield self.seq, *delta.positions(self.bits)
        here = (self.generation, self.seq)
        self.known = not any(at > here for at in self._held)
        self._drop_held()

    def _hold(self, at: tuple[int, int], delta: DigestDelta) -> None:
        size = len(delta.set) + len(delta.clear)
        if len(self._held) >= MAX_HELD_DELTAS or self._held_bytes + size > MAX_HELD_BYTES:
            self._drop_held()
        self._held[at] = delta
        self._held_bytes += size

    def _drop_held(self) -> None:
        self._held, self._held_bytes = {}, 0
