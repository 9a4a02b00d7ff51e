"""Whether an arena's books agree with each other; for tests, and for a process that has time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from events.errors import InvariantError
from kvstore.arena.order import EvictionOrder
from kvstore.arena.slabs import Slabs
from kvstore.arena.slot import Session, Slot, State


def audit(
    slots: Mapping[int, Slot],
    by_key: Mapping[bytes, Slot],
    sessions: Iterable[Session],
    order: EvictionOrder,
    slabs: Slabs,
) -> None:
    """Raises InvariantError with the first promise that is broken."""
    writers: Counter[int] = Counter()
    readers: Counter[int] = Counter()
    for session in sessions:
        writers.update(session.writes.keys())
        readers.update({offset: held.count for offset, held in session.leases.items()})
    _require(sum(slot.slot_bytes for slot in slots.values()) == slabs.used_bytes, "a slot leaks")
    _require(len(order) == sum(slot in order for slot in slots.values()), "a free slot may leave")
    last = 0
    for offset in sorted(slots):
        slot = slots[offset]
        _require(slot.offset == offset >= last, "two slots overlap")
        last = offset + slot.slot_bytes
        _check_slot(slot, writers[offset], readers[offset], by_key, slot in order)
    _require({*writers} | {*readers} <= {*slots}, "somebody holds a slot that is free")
    _require(all(slots.get(slot.offset) is slot for slot in by_key.values()), "a key leads nowhere")


def _check_slot(
    slot: Slot, writers: int, readers: int, by_key: Mapping[bytes, Slot], may_leave: bool
) -> None:
    known = by_key.get(slot.key) is slot
    _require(slot.readers == readers, "a lease was lost")
    _require(known == (slot.state in (State.WRITING, State.READY)), "a key lies")
    _require(writers == (slot.state in (State.WRITING, State.QUARANTINED)), "not one writer")
    _require(slot.state is not State.DYING or readers > 0, "a dead slot is kept")
    idle = slot.state is State.READY and not readers and not slot.pinned_s
    _require(may_leave == idle, "a slot in use may leave, or an idle one may not")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise InvariantError(f"the arena's books are wrong: {promise}")
