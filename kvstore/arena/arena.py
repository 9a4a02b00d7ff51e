"""The arena's users: who writes which block, who reads which, and for how long they may.

Write: reserve, fill the slot, commit or abort; nobody sees a block before its commit, and a key has
one writer. Read: open, copy, release. Whatever a session holds goes back when it ends. Nothing
blocks and nothing waits: all of it is dictionary work under one lock. Monotonic clock only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import RLock

from events.errors import InvariantError
from kvstore.arena.audit import audit
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import ArenaStats, Finished, Opened, Place, Refusal, Want
from kvstore.arena.segment import Segment
from kvstore.arena.slot import Held, Session, Slot, State
from kvstore.arena.table import BlockTable
from kvstore.block import label_of
from kvstore.errors import BadBlockError

Changed = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Told the keys that became readable, and those that ceased to be; under the arena's lock."""


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
        self._table = BlockTable(segment, self.limits, clock, self._gone)
        self._sessions: set[Session] = set()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._listeners: list[Changed] = []

    def subscribe(self, changed: Changed) -> None:
        """Calls `changed` from now on, first with the keys that are readable now."""
        with self._lock:
            changed([slot.key for slot in self._table.ready()], ())
            self._listeners.append(changed)

    def unsubscribe(self, changed: Changed) -> None:
        """It is not called any more."""
        with self._lock:
            self._listeners.remove(changed)

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
                slot = self._table.readable(key)
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
                    if not held.count:
                        del session.leases[place.offset]
                    self._table.remove_readers(held.slot, 1)

    def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """How many blocks from the first key on may be opened."""
        with self._lock:
            for count, key in enumerate(keys):
                if self._table.readable(key) is None:
                    return count
            return len(keys)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Keeps blocks from eviction for a time; how many of them. Pins have a bound in bytes."""
        with self._lock:
            return sum(self._table.pin(key, seconds) for key in keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Ends pins."""
        with self._lock:
            for key in keys:
                self._table.unpin(key)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets readable blocks; whoever reads one now gets a miss."""
        with self._lock:
            found = [slot for key in keys if (slot := self._table.readable(key))]
            return self._table.forget(found, "deleted")

    def purge(self, owner: bytes | None) -> int:
        """Forgets the readable blocks whose namespace or scope is `owner`; all of them for None."""
        with self._lock:
            found = [
                slot for slot in self._table.ready() if owner in (None, slot.namespace, slot.scope)
            ]
            return self._table.forget(found, "deleted")

    def keys(self, after: bytes, limit: int) -> list[bytes]:
        """Readable keys in order, from behind `after` on."""
        with self._lock:
            ready = (slot.key for slot in self._table.ready())
            return sorted(key for key in ready if key > after)[:limit]

    def tick(self) -> list[Session]:
        """Ends what is over; the sessions that have newly become overdue."""
        with self._lock:
            self._table.expire()
            now = self._clock()
            return [session for session in self._sessions if self._late(session, now)]

    def stats(self) -> ArenaStats:
        """A look at the books."""
        with self._lock:
            table, counts = self._table, self._counts
            slots = table.slots.values()
            states = Counter(slot.state for slot in slots)
            quarantined = [slot for slot in slots if slot.state is State.QUARANTINED]
            return ArenaStats(
                total_bytes=table.slabs.total_bytes,
                used_bytes=table.slabs.used_bytes,
                blocks=states[State.READY],
                writing=states[State.WRITING],
                leased=sum(slot.readers > 0 for slot in slots),
                dying=states[State.DYING],
                quarantined=states[State.QUARANTINED],
                quarantined_bytes=sum(slot.slot_bytes for slot in quarantined),
                pinned_bytes=table.pinned_bytes,
                sessions=len(self._sessions),
                hits=counts["hits"],
                misses=counts["misses"],
                stored=counts["stored"],
                evicted=table.counts["evicted"],
                expired=table.counts["expired"],
                deleted=table.counts["deleted"],
                bad_commits=counts["bad_commits"],
                overdue=counts["overdue"],
                reaped=counts["reaped"],
                refused=dict(self._refused),
                scopes=table.scope_use(),
            )

    def check(self) -> None:
        """Raises InvariantError where the books contradict each other."""
        with self._lock:
            table = self._table
            audit(table.slots, table.by_key, self._sessions, table.order, table.slabs)
            charged: Counter[bytes] = Counter()
            for slot in table.slots.values():
                charged[slot.scope] += slot.slot_bytes
            pinned = sum(slot.slot_bytes for slot in table.slots.values() if slot.pinned_s)
            if charged != table.charged or pinned != table.pinned_bytes:
                raise InvariantError("the arena's sums are not those of its slots")

    def _gone(self, keys: Sequence[bytes]) -> None:
        for changed in self._listeners:
            changed((), keys)

    def _reserve(self, session: Session, want: Want) -> Place | Refusal:
        if self._table.writing(want.key):
            return Refusal.BUSY
        if self._table.readable(want.key) is not None:
            return Refusal.PRESENT
        if session.ended or len(session.writes) >= self.limits.session_writes:
            return Refusal.LIMIT
        slot = self._table.place(want)
        if isinstance(slot, Refusal):
            return slot
        session.writes[slot.offset] = Held(slot, self._clock() + self.limits.write_s)
        return _place(slot)

    def _commit(self, session: Session, block: Finished) -> Slot | None:
        held = _held(session.writes, block.place)
        if held is None:
            return None
        slot = held.slot
        namespace = _namespace(slot, block)
        if slot.state is not State.WRITING or namespace is None:
            self._drop_write(session, slot)
            return None
        del session.writes[slot.offset]
        self._table.publish(slot, block.header, namespace, block.ttl_s)
        return slot

    def _drop_write(self, session: Session, slot: Slot) -> None:
        del session.writes[slot.offset]
        self._table.give_up(slot)

    def _lease(self, session: Session, slot: Slot) -> bool:
        held = session.leases.pop(slot.offset, None)
        if held is None:
            if len(session.leases) >= self.limits.session_leases:
                return False
            held = Held(slot, 0.0, 0)
        held.count += 1
        held.deadline_s = self._clock() + self.limits.lease_s
        session.leases[slot.offset] = held
        self._table.add_reader(slot)
        return True

    def _drop_lease(self, session: Session, held: Held) -> None:
        del session.leases[held.slot.offset]
        self._table.remove_readers(held.slot, held.count)

    def _late(self, session: Session, now_s: float) -> bool:
        """Whether the session is overdue since now. Its late writes are quarantined."""
        late_write = False
        for held in session.writes.values():
            if held.deadline_s > now_s:
                break
            if held.slot.state is State.WRITING:
                self._table.quarantine(held.slot)
                late_write = True
        lease = next(iter(session.leases.values()), None)
        if session.overdue or not (late_write or (lease and lease.deadline_s <= now_s)):
            return False
        session.overdue = True
        self._counts["overdue"] += 1
        return True


def _namespace(slot: Slot, block: Finished) -> bytes | None:
    """Out of the header, if it is of the block that the slot was reserved for."""
    try:
        label = label_of(block.header)
    except BadBlockError:
        return None
    if (label.key, label.scope) != (slot.key, slot.scope):
        return None
    return label.namespace if label.payload_bytes == slot.payload_bytes else None


def _place(slot: Slot) -> Place:
    return Place(slot.offset, slot.generation)


def _held(held: Mapping[int, Held], place: Place) -> Held | None:
    """What lies at the place, if it is still the same block."""
    found = held.get(place.offset)
    return found if found is not None and found.slot.generation == place.generation else None
