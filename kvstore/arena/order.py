"""Which block leaves next: the least recently used one of a slot size, or of one owner."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.arena.slot import Slot


class EvictionOrder:
    """The slots that may be evicted now, the longest unused first. A slot that is being read,
    written or is pinned is not in here."""

    def __init__(self) -> None:
        self._sizes: dict[int, OrderedDict[int, Slot]] = {}
        self._scopes: dict[bytes, OrderedDict[int, Slot]] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot.offset in self._sizes.get(slot.slot_bytes, ())

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._sizes.values())

    def add(self, slot: Slot) -> None:
        """As the most recently used."""
        self._sizes.setdefault(slot.slot_bytes, OrderedDict())[slot.offset] = slot
        self._scopes.setdefault(slot.scope, OrderedDict())[slot.offset] = slot

    def remove(self, slot: Slot) -> None:
        """Harmless when it is not in here."""
        slots = self._sizes.get(slot.slot_bytes)
        if slots is None or slots.pop(slot.offset, None) is None:
            return
        if not slots:
            del self._sizes[slot.slot_bytes]
        owned = self._scopes[slot.scope]
        del owned[slot.offset]
        if not owned:
            del self._scopes[slot.scope]

    def oldest(self, slot_bytes: int) -> Slot | None:
        """Of one slot size."""
        return next(iter(self._sizes.get(slot_bytes, {}).values()), None)

    def oldest_of(self, scope: bytes) -> Slot | None:
        """Of one owner."""
        return next(iter(self._scopes.get(scope, {}).values()), None)
