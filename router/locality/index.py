"""Which replica holds how much of a chain, as far as their digests say.

Owns one `Plane` for each (pool, digest shape), and the bound on their memory together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.native import address
from events.load import DigestShape
from router.locality.plane import Plane
from router.locality.planes import NOBODY

MAX_INDEX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Seats:
    """Where an answer of `size` numbers comes from: for each plane, the column of each place, or
    `NOBODY`. Good as long as the index is at `version`. `count`: of the planes.
    `addresses`: the same for a native kernel, int64; `at`: where these lie."""

    version: int
    size: int
    planes: tuple[tuple[Plane, np.ndarray], ...]
    count: int
    addresses: np.ndarray
    at: int

    def depths_of(self, keys: bytes) -> np.ndarray:
        """Leading blocks of the chain, its keys back to back, by place: int32 (size,)."""
        if len(self.planes) == 1:
            plane, columns = self.planes[0]
            return plane.column_depths(keys)[columns]
        found = [plane.column_depths(keys)[columns] for plane, columns in self.planes]
        return np.sum(found, axis=0, dtype=np.int32) if found else np.zeros(self.size, np.int32)


class DigestIndex:
    """Columns by replica id. A replica without a column, or with an unknown one, counts as empty.
    All planes together stay under `max_bytes`.

    `unplaced_total` counts replicas that found no room within `max_bytes`; `version` changes with
    each column that comes or goes.
    """

    def __init__(self, max_bytes: int = MAX_INDEX_BYTES) -> None:
        self.unplaced_total = 0
        self.version = 0
        self.max_bytes = max_bytes
        self._planes: dict[tuple[str, DigestShape], Plane] = {}
        self._homes: dict[str, tuple[str, DigestShape]] = {}
        self._known: set[str] = set()

    def __contains__(self, replica: str) -> bool:
        return replica in self._homes

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def nbytes(self) -> int:
        """Memory of all planes."""
        return sum(plane.nbytes for plane in self._planes.values())

    def place(self, replica: str, pool: str, shape: DigestShape) -> bool:
        """Give the replica an unknown column there; False when memory doesn't allow it.

        A column of another pool or shape is freed first."""
        home = (pool, shape)
        if self._homes.get(replica) == home:
            return True
        self.remove(replica)
        plane = self._planes.get(home) or Plane(shape)
        growth = plane.growth_bytes if home in self._planes else plane.nbytes
        if self.nbytes + growth > self.max_bytes:
            self.unplaced_total += 1
            return False
        self._planes[home] = plane
        self._homes[replica] = home
        plane.add(replica)
        self.version += 1
        return True

    def remove(self, replica: str) -> None:
        """Free the replica's column, and its plane when it was the last one."""
        home = self._homes.pop(replica, None)
        if home is None:
            return
        self._known.discard(replica)
        self.version += 1
        plane = self._planes[home]
        plane.remove(replica)
        if not len(plane):
            del self._planes[home]

    def forget(self, replica: str) -> None:
        """The replica's digest is unknown from now on."""
        if replica in self._known:
            self._known.discard(replica)
            self._plane(replica).forget(replica)

    def reset(self, replica: str, bits: np.ndarray) -> None:
        """A whole digest. Raises ValueError on another length, KeyError without a column."""
        self._plane(replica).reset(replica, bits)
        self._known.add(replica)

    def apply(self, replica: str, set_positions: np.ndarray, clear_positions: np.ndarray) -> None:
        """Changes of a known digest. Raises ValueError on positions outside the shape, KeyError
        without a column."""
        self._plane(replica).apply(replica, set_positions, clear_positions)

    def known(self, replica: str) -> bool:
        """Whether a whole digest of this replica is in place."""
        return replica in self._known

    def fill(self, replica: str) -> float:
        """The share of set bits in the replica's digest."""
        return self._plane(replica).fill(replica) if replica in self._homes else 0.0

    def holds(self, replica: str, halves: np.ndarray) -> np.ndarray:
        """Whether its digest claims these blocks, one by one; none of them while it is unknown."""
        if not self.known(replica):
            return np.zeros(len(halves), bool)
        return self._plane(replica).holds(replica, halves)

    def claimed(self, halves: np.ndarray) -> dict[str, int]:
        """How many of these blocks each known digest claims, one by one."""
        found: dict[str, int] = {}
        for plane in self._planes.values():
            found.update(plane.claimed(halves))
        return found

    def depths(self, pool: str, halves: np.ndarray) -> dict[str, int]:
        """Leading blocks of the chain, for each replica of the pool whose digest is known."""
        depths: dict[str, int] = {}
        for (owner_pool, _), plane in self._planes.items():
            if owner_pool == pool:
                depths.update(plane.depths(halves))
        return depths

    def replicas(self, pool: str) -> set[str]:
        """Who has a column in that pool."""
        return {replica for replica, home in self._homes.items() if home[0] == pool}

    def seats(self, pool: str, places: Mapping[str, int]) -> Seats:
        """For look-ups: the answer has the depth of each replica at its place, 0 without a
        digest. All columns of the pool must have a place."""
        planes = []
        for (owner_pool, _), plane in self._planes.items():
            if owner_pool == pool:
                columns = np.full(len(places), NOBODY, np.int64)
                for replica, column in plane.columns():
                    columns[places[replica]] = column
                planes.append((plane, columns))
        looks = [(*plane.look_up_at, address(columns)) for plane, columns in planes]
        addresses = np.array(looks or [0], np.int64)
        return Seats(
            self.version, len(places), tuple(planes), len(planes), addresses, address(addresses)
        )

    def _plane(self, replica: str) -> Plane:
        return self._planes[self._homes[replica]]
