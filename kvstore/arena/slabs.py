"""Which parts of the arena are free: extents, cut into slots of one size each.

A size gets an extent when it needs one and gives it back with its last slot, so that models with
other layouts can follow each other in one arena. Knows nothing of what lies in a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.arena.segment import round_up

MAX_EXTENT_BYTES = 64 << 20
_MIN_EXTENT_BYTES = 1 << 20
_EXTENTS = 16
"""Few and large: a block of a large model must fit into one."""


@dataclass(slots=True, eq=False)
class Extent:
    """A part of the arena, cut for slots of `slot_bytes`."""

    start: int
    slot_bytes: int
    free: list[int]
    used: set[int]


class Slabs:
    """Slots of many sizes in `total_bytes`. Every size is a multiple of the segment's unit."""

    def __init__(self, total_bytes: int) -> None:
        wanted = min(max(total_bytes // _EXTENTS, _MIN_EXTENT_BYTES), MAX_EXTENT_BYTES)
        self.extent_bytes = min(round_up(wanted), total_bytes)
        self._spare = list(range(0, total_bytes - self.extent_bytes + 1, self.extent_bytes))
        self._spare.reverse()
        self._extents: dict[int, Extent] = {}
        self._open: dict[int, dict[int, Extent]] = {}
        self.used_bytes = 0

    @property
    def max_slot_bytes(self) -> int:
        """The largest slot that can be had."""
        return self.extent_bytes

    @property
    def total_bytes(self) -> int:
        """In all extents, cut or not."""
        return (len(self._spare) + len(self._extents)) * self.extent_bytes

    def allocate(self, slot_bytes: int) -> int | None:
        """The offset of a free slot; None where no extent of the size has one and none is spare."""
        extents = self._open.setdefault(slot_bytes, {})
        extent = next(iter(extents.values()), None) or self._cut(slot_bytes)
        if extent is None:
            return None
        offset = extent.free.pop()
        extent.used.add(offset)
        self.used_bytes += slot_bytes
        if not extent.free:
            del extents[extent.start]
        return offset

    def free(self, offset: int) -> None:
        """Gives a slot back, and its extent with the last one. Raises KeyError when it was free."""
        extent = self._extents[offset // self.extent_bytes * self.extent_bytes]
        extent.used.remove(offset)
        extent.free.append(offset)
        self.used_bytes -= extent.slot_bytes
        extents = self._open.setdefault(extent.slot_bytes, {})
        extents[extent.start] = extent
        if not extent.used:
            del extents[extent.start], self._extents[extent.start]
            self._spare.append(extent.start)
        if not extents:
            del self._open[extent.slot_bytes]

    def others(self, slot_bytes: int) -> Iterator[Extent]:
        """The extents that are cut for other sizes."""
        return (extent for extent in self._extents.values() if extent.slot_bytes != slot_bytes)

    def _cut(self, slot_bytes: int) -> Extent | None:
        if not self._spare or slot_bytes > self.extent_bytes:
            return None
        start = self._spare.pop()
        count = self.extent_bytes // slot_bytes
        free = [start + place * slot_bytes for place in range(count - 1, -1, -1)]
        extent = Extent(start, slot_bytes, free, set())
        self._extents[start] = extent
        self._open[slot_bytes][start] = extent
        return extent
