"""The arena's books: which block lies where, who writes it, who reads it, who has to leave.

Write: reserve, fill the slot, commit or abort; nobody sees a block before its commit, and a key has
one writer. Read: open, copy, release. Whatever a session holds goes back when it ends. Nothing
blocks and nothing waits: all of it is dictionary work under one lock. Monotonic clock only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock

from events.errors import InvariantError
from kvstore.arena.audit import audit
from kvstore.arena.messages import ArenaStats, Finished, Opened, Place, Refusal, ScopeUse, Want
from kvstore.arena.order import EvictionOrder
from kvstore.arena.segment import Segment, round_up
from kvstore.arena.slabs import Slabs
from kvstore.arena.slot import Held, Session, Slot, State
from kvstore.arena.timers import SlotTimers
from kvstore.block import decode
from kvstore.errors import BadBlockError
from kvstore.identity import PUBLIC_SCOPE

_LOOK_ELSEWHERE = 64
"""After so many evictions of one size it is asked whether another size holds older blocks."""

Changed = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Told the keys that became readable, and those that ceased to be; under the arena's lock."""


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """`scope_share`: how much of the arena one owner may take where `scope_bytes` doesn't say;
    public blocks may take all of it. Past `write_s` and `lease_s` a user is overdue."""

    scope_share: float = 0.5
    scope_bytes: Mapping[bytes, int] = field(default_factory=dict)
    write_s: float = 10.0
    lease_s: float = 30.0
    session_writes: int = 1_024
    session_leases: int = 4_096
    pinned_share: float = 0.5


class Arena:
    """Threads may share it. Raises InvariantError where its own books are wrong: then it must not
    go on."""

    def __init__(
        self,
        segment: Segment,
        limits: ArenaLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.segment = segment
        self.limits = limits or ArenaLimits()
        self._clock = clock
        self._lock = RLock()
        self._slabs = Slabs(segment.slot_bytes)
        self._slots: dict[int, Slot] = {}
        self._by_key: dict[bytes, Slot] = {}
        self._order = EvictionOrder()
        self._timers = SlotTimers()
        self._sessions: set[Session] = set()
        self._charged: Counter[bytes] = Counter()
        self._pinned_bytes = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._generation = 0
        self._uses = 0
        self._listeners: list[Changed] = []

    @property
    def max_payload_bytes(self) -> int:
        """The largest block that it takes."""
        return self._slabs.max_slot_bytes

    def subscribe(self, changed: Changed) -> list[bytes]:
        """Calls `changed` from now on; returns the keys that are readable now."""
        with self._lock:
            self._listeners.append(changed)
            return [key for key, slot in self._by_key.items() if slot.state is State.READY]

    def session(self, name: str) -> Session:
        """A new user."""
        with self._lock:
            session = Session(name)
            self._sessions.add(session)
            return session

    def end(self, session: Session) -> None:
        """Takes back all that it holds: its user is known to have stopped. Idempotent."""
        with self._lock:
            if session.ended:
                return
            session.ended = True
            self._sessions.remove(session)
            self._counts["reaped"] += len(session.writes) + len(session.leases)
            for held in list(session.writes.values()):
                self._drop_write(session, held.slot)
            for held in reversed(list(session.leases.values())):
                self._drop_lease(session, held)

    def reserve(self, session: Session, wants: Sequence[Want]) -> list[Place | Refusal]:
        """A slot to write in for each block, or why not."""
        with self._lock:
            results = [self._reserve(session, want) for want in wants]
            self._refused.update(r.value for r in results if isinstance(r, Refusal))
            return results

    def commit(self, session: Session, finished: Sequence[Finished]) -> list[bool]:
        """Makes blocks readable; False where the slot is not this session's (any more), or the
        header is not of the block that was reserved."""
        with self._lock:
            slots = [self._commit(session, block) for block in finished]
            if stored := [slot.key for slot in slots if slot is not None]:
                for changed in self._listeners:
                    changed(stored, ())
            self._counts["stored"] += len(stored)
            self._counts["bad_commits"] += len(slots) - len(stored)
            return [slot is not None for slot in slots]

    def abort(self, session: Session, places: Sequence[Place]) -> None:
        """Gives reserved slots back; those that are not this session's are left alone."""
        with self._lock:
            for place in places:
                if held := _held(session.writes, place):
                    self._drop_write(session, held.slot)

    def open(self, session: Session, keys: Sequence[bytes]) -> list[Opened]:
        """Leases the blocks from the first key on, up to the first one that is not there."""
        with self._lock:
            opened = []
            for key in keys:
                slot = self._readable(key)
                if slot is None or session.ended:
                    break
                if not self._lease(session, slot):
                    break
                opened.append(Opened(_place(slot), slot.payload_bytes, slot.header))
            self._counts["hits"] += len(opened)
            self._counts["misses"] += len(keys) - len(opened)
            return opened

    def release(self, session: Session, places: Sequence[Place]) -> None:
        """Ends leases; those that are not this session's (any more) are left alone. The head of the
        run counts as used last, so that the tail leaves before it."""
        with self._lock:
            for place in reversed(places):
                if held := _held(session.leases, place):
                    held.count -= 1
                    held.slot.readers -= 1
                    if not held.count:
                        del session.leases[place.offset]
                    self._unused(held.slot)

    def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """How many blocks from the first key on may be opened."""
        with self._lock:
            for count, key in enumerate(keys):
                if self._readable(key) is None:
                    return count
            return len(keys)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Keeps blocks from eviction for a time; how many of them. Pins have a bound in bytes."""
        with self._lock:
            return sum(self._pin(key, self._clock() + seconds) for key in keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Ends pins."""
        with self._lock:
            for key in keys:
                if slot := self._by_key.get(key):
                    self._unpin(slot)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets readable blocks; whoever reads one now gets a miss."""
        with self._lock:
            return self._forget([slot for key in keys if (slot := self._readable(key))], "deleted")

    def purge(self, owner: bytes | None) -> int:
        """Forgets the readable blocks whose namespace or scope is `owner`; all of them for None."""
        with self._lock:
            found = [
                slot
                for slot in self._by_key.values()
                if slot.state is State.READY and owner in (None, slot.namespace, slot.scope)
            ]
            return self._forget(found, "deleted")

    def keys(self, after: bytes, limit: int) -> list[bytes]:
        """Readable keys in order, from behind `after` on."""
        with self._lock:
            ready = (key for key, slot in self._by_key.items() if slot.state is State.READY)
            return sorted(key for key in ready if key > after)[:limit]

    def tick(self) -> list[Session]:
        """Ends what is over; the sessions that have newly become overdue."""
        with self._lock:
            now = self._clock()
            over = []
            for slot in self._timers.due(now):
                if slot.state is not State.READY:
                    continue
                if slot.ends_s is not None and slot.ends_s <= now:
                    over.append(slot)
                elif slot.pinned_s and slot.pinned_s <= now:
                    self._unpin(slot)
            self._forget(over, "expired")
            self._timers.trim(self._slots.values(), len(self._slots))
            return [session for session in self._sessions if self._late(session, now)]

    def stats(self) -> ArenaStats:
        """A look at the books."""
        with self._lock:
            states = Counter(slot.state for slot in self._slots.values())
            quarantined = [s for s in self._slots.values() if s.state is State.QUARANTINED]
            counts = self._counts
            return ArenaStats(
                total_bytes=self._slabs.total_bytes,
                used_bytes=self._slabs.used_bytes,
                blocks=states[State.READY],
                writing=states[State.WRITING],
                leased=sum(slot.readers > 0 for slot in self._slots.values()),
                dying=states[State.DYING],
                quarantined=states[State.QUARANTINED],
                quarantined_bytes=sum(slot.slot_bytes for slot in quarantined),
                pinned_bytes=self._pinned_bytes,
                sessions=len(self._sessions),
                hits=counts["hits"],
                misses=counts["misses"],
                stored=counts["stored"],
                evicted=counts["evicted"],
                expired=counts["expired"],
                deleted=counts["deleted"],
                bad_commits=counts["bad_commits"],
                overdue=counts["overdue"],
                reaped=counts["reaped"],
                refused=dict(self._refused),
                scopes=self._scope_use(),
            )

    def check(self) -> None:
        """Raises InvariantError where the books contradict each other."""
        with self._lock:
            audit(self._slots, self._by_key, self._sessions, self._order, self._slabs)
            charged: Counter[bytes] = Counter()
            for slot in self._slots.values():
                charged[slot.scope] += slot.slot_bytes
            pinned = sum(slot.slot_bytes for slot in self._slots.values() if slot.pinned_s)
            if charged != self._charged or pinned != self._pinned_bytes:
                raise InvariantError("the arena's sums are not those of its slots")

    def _scope_use(self) -> list[ScopeUse]:
        blocks = Counter(slot.scope for slot in self._by_key.values())
        return [
            ScopeUse(scope.hex(), used, self._quota_bytes(scope), blocks[scope])
            for scope, used in self._charged.most_common()
        ]

    def _reserve(self, session: Session, want: Want) -> Place | Refusal:
        there = self._by_key.get(want.key)
        if there is not None and there.state is State.WRITING:
            return Refusal.BUSY
        if self._readable(want.key) is not None:
            return Refusal.PRESENT
        if session.ended or len(session.writes) >= self.limits.session_writes:
            return Refusal.LIMIT
        slot_bytes = round_up(want.payload_bytes)
        if not 0 < slot_bytes <= self._slabs.max_slot_bytes:
            return Refusal.SIZE
        if not self._within_quota(want.scope, slot_bytes):
            return Refusal.QUOTA
        offset = self._allocate(slot_bytes)
        if offset is None:
            return Refusal.FULL
        self._generation += 1
        slot = Slot(offset, slot_bytes, self._generation, want.key, want.scope, want.payload_bytes)
        self.segment.stamp(offset, slot.generation)
        self._slots[offset] = self._by_key[want.key] = slot
        self._charged[want.scope] += slot_bytes
        session.writes[offset] = Held(slot, self._clock() + self.limits.write_s)
        return _place(slot)

    def _quota_bytes(self, scope: bytes) -> int:
        share = 1.0 if scope == PUBLIC_SCOPE else self.limits.scope_share
        return self.limits.scope_bytes.get(scope, int(share * self._slabs.total_bytes))

    def _within_quota(self, scope: bytes, slot_bytes: int) -> bool:
        """Whether the owner may have one more slot, after its own oldest blocks have left."""
        quota = self._quota_bytes(scope)
        if slot_bytes > quota:
            return False
        while self._charged[scope] + slot_bytes > quota:
            oldest = self._order.oldest_of(scope)
            if oldest is None:
                return False
            self._forget([oldest], "evicted")
        return True

    def _allocate(self, slot_bytes: int) -> int | None:
        """A free slot, after the oldest blocks have left; None where all are in use."""
        while (offset := self._slabs.allocate(slot_bytes)) is None:
            victims = self._victims(slot_bytes)
            if not victims:
                return None
            self._forget(victims, "evicted")
        return offset

    def _victims(self, slot_bytes: int) -> list[Slot]:
        """The oldest block of the size, or a whole extent of another size that is older still."""
        own = self._order.oldest(slot_bytes)
        if own is not None and self._counts["evicted"] % _LOOK_ELSEWHERE:
            return [own]
        best, best_used = ([] if own is None else [own]), (own.used if own else self._uses + 1)
        for extent in self._slabs.others(slot_bytes):
            slots = [self._slots[offset] for offset in extent.used]
            latest = max(slot.used for slot in slots)
            if latest < best_used and all(slot in self._order for slot in slots):
                best, best_used = slots, latest
        return best

    def _commit(self, session: Session, block: Finished) -> Slot | None:
        held = _held(session.writes, block.place)
        if held is None:
            return None
        slot = held.slot
        if slot.state is not State.WRITING or not self._accept(slot, block):
            self._drop_write(session, slot)
            return None
        del session.writes[slot.offset]
        slot.state = State.READY
        self._use(slot)
        self._order.add(slot)
        return slot

    def _accept(self, slot: Slot, block: Finished) -> bool:
        """Takes the header over, if it is of the block that the slot was reserved for."""
        try:
            header = decode(block.header)
        except BadBlockError:
            return False
        identity = header.block
        if (identity.key, identity.scope) != (slot.key, slot.scope):
            return False
        if header.payload_bytes != slot.payload_bytes:
            return False
        slot.header, slot.namespace = block.header, identity.namespace
        if block.ttl_s is not None:
            slot.ends_s = self._clock() + block.ttl_s
            self._timers.add(slot.ends_s, slot)
        return True

    def _lease(self, session: Session, slot: Slot) -> bool:
        held = session.leases.pop(slot.offset, None)
        if held is None:
            if len(session.leases) >= self.limits.session_leases:
                return False
            held = Held(slot, 0.0, 0)
        held.count += 1
        held.deadline_s = self._clock() + self.limits.lease_s
        session.leases[slot.offset] = held
        slot.readers += 1
        self._order.remove(slot)
        return True

    def _drop_lease(self, session: Session, held: Held) -> None:
        del session.leases[held.slot.offset]
        held.slot.readers -= held.count
        self._unused(held.slot)

    def _unused(self, slot: Slot) -> None:
        """One reader fewer: the slot may leave, or has been waiting for this."""
        if slot.readers:
            return
        if slot.state is State.DYING:
            self._free(slot)
            return
        self._use(slot)
        if not slot.pinned_s:
            self._order.add(slot)

    def _use(self, slot: Slot) -> None:
        self._uses += 1
        slot.used = self._uses

    def _drop_write(self, session: Session, slot: Slot) -> None:
        del session.writes[slot.offset]
        if slot.state is State.WRITING:
            del self._by_key[slot.key]
        self._free(slot)

    def _readable(self, key: bytes) -> Slot | None:
        """The block, unless it is being written or its time is over."""
        slot = self._by_key.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        if slot.ends_s is not None and slot.ends_s <= self._clock():
            self._forget([slot], "expired")
            return None
        return slot

    def _forget(self, slots: Sequence[Slot], count: str) -> int:
        """Readable blocks that are so no longer. Their memory is free once nobody reads it."""
        for slot in slots:
            del self._by_key[slot.key]
            self.segment.stamp(slot.offset, 0)
            self._order.remove(slot)
            slot.state = State.DYING
            self._unpin(slot)
            if not slot.readers:
                self._free(slot)
        self._counts[count] += len(slots)
        if slots:
            removed = [slot.key for slot in slots]
            for changed in self._listeners:
                changed((), removed)
        return len(slots)

    def _free(self, slot: Slot) -> None:
        self.segment.stamp(slot.offset, 0)
        slot.generation = 0
        self._order.remove(slot)
        del self._slots[slot.offset]
        self._slabs.free(slot.offset)
        self._charged[slot.scope] -= slot.slot_bytes
        if not self._charged[slot.scope]:
            del self._charged[slot.scope]

    def _pin(self, key: bytes, until_s: float) -> bool:
        slot = self._readable(key)
        if slot is None:
            return False
        if not slot.pinned_s:
            if self._pinned_bytes + slot.slot_bytes > self._pin_bound:
                return False
            self._pinned_bytes += slot.slot_bytes
        slot.pinned_s = max(slot.pinned_s, until_s)
        self._timers.add(slot.pinned_s, slot)
        self._order.remove(slot)
        return True

    @property
    def _pin_bound(self) -> float:
        return self.limits.pinned_share * self._slabs.total_bytes

    def _unpin(self, slot: Slot) -> None:
        if not slot.pinned_s:
            return
        slot.pinned_s = 0.0
        self._pinned_bytes -= slot.slot_bytes
        if slot.state is State.READY and not slot.readers:
            self._order.add(slot)

    def _late(self, session: Session, now_s: float) -> bool:
        """Whether the session is overdue since now. Its late writes are quarantined: the key is
        free, the memory is not, since it may still be written."""
        late_write = False
        for held in session.writes.values():
            if held.deadline_s > now_s:
                break
            if held.slot.state is State.WRITING:
                held.slot.state = State.QUARANTINED
                self.segment.stamp(held.slot.offset, 0)
                del self._by_key[held.slot.key]
                late_write = True
        lease = next(iter(session.leases.values()), None)
        if session.overdue or not (late_write or (lease and lease.deadline_s <= now_s)):
            return False
        session.overdue = True
        self._counts["overdue"] += 1
        return True


def _place(slot: Slot) -> Place:
    return Place(slot.offset, slot.generation)


def _held(held: Mapping[int, Held], place: Place) -> Held | None:
    """What lies at the place, if it is still the same block."""
    found = held.get(place.offset)
    return found if found is not None and found.slot.generation == place.generation else None
