"""What happens to a slot at a later time: its TTL or its pin ends. Monotonic clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from kvstore.arena.slot import Slot

_SLACK = 1_024


class SlotTimers:
    """Times at which slots are to be looked at. One that has got another generation meanwhile is
    skipped; where too many of those have gathered, they are thrown out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Slot]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, slot: Slot) -> None:
        """Look at `slot` then."""
        self._added += 1
        heapq.heappush(self._heap, (at_s, self._added, slot.generation, slot))

    def due(self, now_s: float) -> Iterator[Slot]:
        """Slots whose time has come, once per time."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, generation, slot = heapq.heappop(self._heap)
            if slot.generation == generation:
                yield slot

    def trim(self, living: Iterable[Slot], count: int) -> None:
        """Keeps at most a few times as many entries as the `count` slots that live."""
        if len(self._heap) <= 2 * count + _SLACK:
            return
        self._heap.clear()
        for slot in living:
            for at_s in (slot.ends_s, slot.pinned_s):
                if at_s:
                    self.add(at_s, slot)
