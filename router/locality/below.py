"""What replicas can fetch from tiers below their device, as far as their digests say.

One index for each place in a hello's `tiers`. Replicas that name the same store can all fetch what
any of them shows of it: the deepest of their columns counts for each. A hint, like all of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from events.digest import MAX_COLUMNS
from events.load import DigestShape
from router.locality.index import DigestIndex, Seats

TIERS = MAX_COLUMNS - 1

MAX_BYTES = 128 * 1024 * 1024
"""Of one tier's planes."""


class BelowIndex:
    """Columns by replica id, beside those of the device. `used`: there may be some."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.used = False
        self.tiers = tuple(DigestIndex(max_bytes) for _ in range(TIERS))

    def __len__(self) -> int:
        """How many columns there are."""
        return sum(map(len, self.tiers))

    @property
    def nbytes(self) -> int:
        """Memory of all planes."""
        return sum(tier.nbytes for tier in self.tiers)

    @property
    def max_bytes(self) -> int:
        """At most so much."""
        return sum(tier.max_bytes for tier in self.tiers)

    @property
    def unplaced_total(self) -> int:
        """Columns that found no room."""
        return sum(tier.unplaced_total for tier in self.tiers)

    def reset(
        self, replica: str, pool: str, shape: DigestShape, columns: Sequence[np.ndarray]
    ) -> None:
        """The whole digests of a replica's tiers; one that finds no room stays unknown.

        Raises ValueError on a wrong length."""
        for place, tier in enumerate(self.tiers):
            if place >= len(columns):
                tier.remove(replica)
            elif tier.place(replica, pool, shape):
                self.used = True
                tier.reset(replica, columns[place])

    def apply(
        self, replica: str, place: int, set_positions: np.ndarray, clear_positions: np.ndarray
    ) -> None:
        """Changes of one tier's digest, if it is known. Raises ValueError on a wrong position."""
        tier = self.tiers[place]
        if tier.known(replica):
            tier.apply(replica, set_positions, clear_positions)

    def forget(self, replica: str) -> None:
        """The replica's digests are unknown from now on."""
        for tier in self.tiers:
            tier.forget(replica)

    def remove(self, replica: str) -> None:
        """Free the replica's columns."""
        for tier in self.tiers:
            tier.remove(replica)
        self.used = len(self) > 0


class Reach:
    """Depths in the tiers below, for the rows of one board. `stores[place]`: the store that each
    row names there, empty for one of its own; they stay as they are for the board's life."""

    def __init__(
        self, index: BelowIndex, pool: str, rows: Mapping[str, int], stores: Sequence[Sequence[str]]
    ) -> None:
        self._index = index
        self._pool = pool
        self._rows = rows
        self._groups = [_groups(names) for names in stores]
        self._seats: list[Seats | None] = [None] * TIERS

    def depths(self, keys: bytes) -> np.ndarray:
        """Leading blocks that each row can find in each tier: int32 (TIERS, rows)."""
        found = np.zeros((TIERS, len(self._rows)), np.int32)
        for place, tier in enumerate(self._index.tiers):
            if len(tier):
                found[place] = self._tier_depths(place, keys)
        return found

    def _tier_depths(self, place: int, keys: bytes) -> np.ndarray:
        tier = self._index.tiers[place]
        seats = self._seats[place]
        if seats is None or seats.version != tier.version:
            for stranger in tier.replicas(self._pool) - self._rows.keys():
                tier.remove(stranger)
            seats = self._seats[place] = tier.seats(self._pool, self._rows)
        depths = seats.depths_of(keys)
        groups = self._groups[place]
        if groups is None:
            return depths
        deepest = np.zeros(len(depths), np.int32)
        np.maximum.at(deepest, groups, depths)
        return deepest[groups]


def _groups(names: Sequence[str]) -> np.ndarray | None:
    """A number for each row, equal where the store is; None where nobody shares one."""
    first: dict[str, int] = {}
    groups = [first.setdefault(name, row) if name else row for row, name in enumerate(names)]
    return None if groups == list(range(len(names))) else np.array(groups)
