"""Which block lies in which slot, and which one has to leave for another: quotas, age, TTL, pins.

Knows no users: whoever writes or reads a slot is counted, not named. Its owner holds a lock around
every call. Monotonic clock only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Refusal, ScopeUse, Want
from kvstore.arena.order import EvictionOrder
from kvstore.arena.segment import Segment, round_up
from kvstore.arena.slabs import Slabs
from kvstore.arena.slot import Slot, State
from kvstore.arena.timers import SlotTimers
from kvstore.identity import PUBLIC_SCOPE

_LOOK_ELSEWHERE = 64
"""After so many evictions of one size it is asked whether another size holds older blocks."""


class BlockTable:
    """`gone` is told the keys that ceased to be readable. `counts`: blocks that left, by how."""

    def __init__(
        self,
        segment: Segment,
        limits: ArenaLimits,
        clock: Callable[[], float],
        gone: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.charged: Counter[bytes] = Counter()
        self.pinned_bytes = 0
        self.order = EvictionOrder()
        self.slabs = Slabs(segment.slot_bytes)
        self.timers = SlotTimers()
        self._segment = segment
        self._limits = limits
        self._clock = clock
        self._gone = gone
        self._slots: dict[int, Slot] = {}
        self._by_key: dict[bytes, Slot] = {}
        self._generation = 0
        self._uses = 0

    @property
    def slots(self) -> Mapping[int, Slot]:
        """All that are not free, by offset."""
        return self._slots

    @property
    def by_key(self) -> Mapping[bytes, Slot]:
        """Those that are READY, or WRITING."""
        return self._by_key

    def ready(self) -> Iterator[Slot]:
        """All that were committed, their time over or not."""
        return (slot for slot in self._by_key.values() if slot.state is State.READY)

    def readable(self, key: bytes) -> Slot | None:
        """The block, unless it is being written or its time is over."""
        slot = self._by_key.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        if slot.ends_s is not None and slot.ends_s <= self._clock():
            self.forget([slot], "expired")
            return None
        return slot

    def writing(self, key: bytes) -> bool:
        """Whether somebody writes the block now."""
        slot = self._by_key.get(key)
        return slot is not None and slot.state is State.WRITING

    def place(self, want: Want) -> Slot | Refusal:
        """A slot to write in, for which others may have had to leave; or why there is none. The key
        is not in the table."""
        slot_bytes = round_up(want.payload_bytes)
        if not 0 < slot_bytes <= self.slabs.max_slot_bytes:
            return Refusal.SIZE
        if not self._within_quota(want.scope, slot_bytes):
            return Refusal.QUOTA
        offset = self._allocate(slot_bytes)
        if offset is None:
            return Refusal.FULL
        self._generation += 1
        slot = Slot(offset, slot_bytes, self._generation, want.key, want.scope, want.payload_bytes)
        self._segment.stamp(offset, slot.generation)
        self._slots[offset] = self._by_key[want.key] = slot
        self.charged[want.scope] += slot_bytes
        return slot

    def publish(self, slot: Slot, header: bytes, namespace: bytes, ttl_s: float | None) -> None:
        """It has been written whole: it may be read, and may leave."""
        slot.header, slot.namespace = header, namespace
        if ttl_s is not None:
            slot.ends_s = self._clock() + ttl_s
            self.timers.add(slot.ends_s, slot)
        slot.state = State.READY
        self._use(slot)
        self.order.add(slot)

    def give_up(self, slot: Slot) -> None:
        """Nobody writes it any more, and it is not whole."""
        if slot.state is State.WRITING:
            del self._by_key[slot.key]
        self._free(slot)

    def quarantine(self, slot: Slot) -> None:
        """Its writer is late: the key is free, the memory is not, since it may still be written."""
        slot.state = State.QUARANTINED
        self._segment.stamp(slot.offset, 0)
        del self._by_key[slot.key]

    def add_reader(self, slot: Slot) -> None:
        """It can't leave until as many were removed."""
        slot.readers += 1
        self.order.remove(slot)

    def remove_readers(self, slot: Slot, count: int) -> None:
        """The slot may leave with the last one, or has been waiting for this."""
        slot.readers -= count
        if slot.readers:
            return
        if slot.state is State.DYING:
            self._free(slot)
            return
        self._use(slot)
        if not slot.pinned_s:
            self.order.add(slot)

    def forget(self, slots: Sequence[Slot], how: str) -> int:
        """Readable blocks that are so no longer. Their memory is free once nobody reads it."""
        for slot in slots:
            del self._by_key[slot.key]
            self._segment.stamp(slot.offset, 0)
            self.order.remove(slot)
            slot.state = State.DYING
            self._unpin(slot)
            if not slot.readers:
                self._free(slot)
        self.counts[how] += len(slots)
        if slots:
            self._gone([slot.key for slot in slots])
        return len(slots)

    def expire(self) -> None:
        """Ends the lives and pins whose time is over."""
        now, over = self._clock(), []
        for slot in self.timers.due(now):
            if slot.state is not State.READY:
                continue
            if slot.ends_s is not None and slot.ends_s <= now:
                over.append(slot)
            elif slot.pinned_s and slot.pinned_s <= now:
                self._unpin(slot)
        self.forget(over, "expired")
        self.timers.trim(self._slots.values(), len(self._slots))

    def pin(self, key: bytes, seconds: float) -> bool:
        """Keeps a block from eviction; False where it is not there, or too much is pinned."""
        slot = self.readable(key)
        if slot is None:
            return False
        if not slot.pinned_s:
            bound = self._limits.pinned_share * self.slabs.total_bytes
            if self.pinned_bytes + slot.slot_bytes > bound:
                return False
            self.pinned_bytes += slot.slot_bytes
        slot.pinned_s = max(slot.pinned_s, self._clock() + seconds)
        self.timers.add(slot.pinned_s, slot)
        self.order.remove(slot)
        return True

    def unpin(self, key: bytes) -> None:
        """Harmless where it is not pinned."""
        if slot := self._by_key.get(key):
            self._unpin(slot)

    def scope_use(self) -> list[ScopeUse]:
        """Who takes how much."""
        blocks = Counter(slot.scope for slot in self._by_key.values())
        return [
            ScopeUse(scope.hex(), used, self._quota_bytes(scope), blocks[scope])
            for scope, used in self.charged.most_common()
        ]

    def _quota_bytes(self, scope: bytes) -> int:
        share = 1.0 if scope == PUBLIC_SCOPE else self._limits.scope_share
        return self._limits.scope_bytes.get(scope, int(share * self.slabs.total_bytes))

    def _within_quota(self, scope: bytes, slot_bytes: int) -> bool:
        """Whether the owner may have one more slot, after its own oldest blocks have left."""
        quota = self._quota_bytes(scope)
        if slot_bytes > quota:
            return False
        while self.charged[scope] + slot_bytes > quota:
            oldest = self.order.oldest_of(scope)
            if oldest is None:
                return False
            self.forget([oldest], "evicted")
        return True

    def _allocate(self, slot_bytes: int) -> int | None:
        """A free slot, after the oldest blocks have left; None where all are in use."""
        while (offset := self.slabs.allocate(slot_bytes)) is None:
            victims = self._victims(slot_bytes)
            if not victims:
                return None
            self.forget(victims, "evicted")
        return offset

    def _victims(self, slot_bytes: int) -> list[Slot]:
        """The oldest block of the size, or a whole extent of another size that is older still."""
        own = self.order.oldest(slot_bytes)
        if own is not None and self.counts["evicted"] % _LOOK_ELSEWHERE:
            return [own]
        best, best_used = ([] if own is None else [own]), (own.used if own else self._uses + 1)
        for extent in self.slabs.others(slot_bytes):
            slots = [self._slots[offset] for offset in extent.used]
            latest = max(slot.used for slot in slots)
            if latest < best_used and all(slot in self.order for slot in slots):
                best, best_used = slots, latest
        return best

    def _use(self, slot: Slot) -> None:
        self._uses += 1
        slot.used = self._uses

    def _free(self, slot: Slot) -> None:
        self._segment.stamp(slot.offset, 0)
        slot.generation = 0
        self.order.remove(slot)
        del self._slots[slot.offset]
        self.slabs.free(slot.offset)
        self.charged[slot.scope] -= slot.slot_bytes
        if not self.charged[slot.scope]:
            del self.charged[slot.scope]

    def _unpin(self, slot: Slot) -> None:
        if not slot.pinned_s:
            return
        slot.pinned_s = 0.0
        self.pinned_bytes -= slot.slot_bytes
        if slot.state is State.READY and not slot.readers:
            self.order.add(slot)
