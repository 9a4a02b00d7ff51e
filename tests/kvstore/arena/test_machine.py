"""The arena against a naive twin, whatever the order of events (K2, K5)."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Place, Refusal
from kvstore.arena.slot import Session
from kvstore.kvd.following import Following
from tests.kvstore.arena.users import LARGE, LARGER, World, run_of

BLOCKS = (*run_of(5, salt=b"a"), *run_of(4, salt=b"b"), *run_of(2, salt=b""))
LIMITS = ArenaLimits(scope_share=0.5, write_s=10.0, lease_s=20.0, pinned_share=0.3)
which = st.integers(0, len(BLOCKS) - 1)
who = st.integers(0, 2)


@dataclass
class User:
    session: Session
    writes: dict[Place, int] = field(default_factory=dict)
    leases: list[tuple[int, Place]] = field(default_factory=list)


class ArenaMachine(RuleBasedStateMachine):
    """The twin knows what was committed when (`versions`), never what was evicted: a block may be
    missing, but one that is there is the one that was committed last, and lies where nobody else
    writes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3, LIMITS)
        self.users = [User(self.world.arena.session(str(place))) for place in range(3)]
        self.readable: dict[bytes, Place] = {}
        self.world.arena.subscribe(self.changed)
        self.following = Following(self.world.arena)
        self.told: set[bytes] = set()

    def changed(self, stored: object, removed: object) -> None:
        assert isinstance(removed, (list, tuple))
        for key in removed:
            del self.readable[key]

    @rule()
    def take(self) -> None:
        if changes := self.following.take():
            assert self.told.isdisjoint(changes.stored)
            assert self.told.issuperset(changes.removed)
            self.told.update(changes.stored)
            self.told.difference_update(changes.removed)
            assert self.told == {*self.readable}

    @rule(user=who, block=which, large=st.booleans())
    def reserve(self, user: int, block: int, large: bool) -> None:
        layout = LARGER if large else LARGE
        answer = self.world.reserve(self.users[user].session, BLOCKS[block], layout)
        if isinstance(answer, Place):
            assert BLOCKS[block].key not in self.readable
            for other in self.users:
                assert all(answer.offset != place.offset for place in other.writes)
                assert all(answer.offset != place.offset for _, place in other.leases)
            self.users[user].writes[answer] = block
        elif answer is Refusal.PRESENT:
            assert BLOCKS[block].key in self.readable

    @rule(user=who, large=st.booleans(), ttl=st.sampled_from([None, 5.0, 30.0]))
    def commit(self, user: int, large: bool, ttl: float | None) -> None:
        if not self.users[user].writes:
            return
        place, block = self.users[user].writes.popitem()
        layout = LARGER if large else LARGE
        if self.world.commit(self.users[user].session, BLOCKS[block], place, layout, ttl):
            assert BLOCKS[block].key not in self.readable
            self.readable[BLOCKS[block].key] = place

    @rule(user=who, block=which, large=st.booleans())
    def store(self, user: int, block: int, large: bool) -> None:
        layout, session = LARGER if large else LARGE, self.users[user].session
        place = self.world.reserve(session, BLOCKS[block], layout)
        if isinstance(place, Place):
            assert self.world.commit(session, BLOCKS[block], place, layout)
            self.readable[BLOCKS[block].key] = place

    @rule(user=who, one=which)
    def open_twice(self, user: int, one: int) -> None:
        for _ in range(2):
            self.open(user, one, 1)

    @rule(user=who)
    def abort(self, user: int) -> None:
        if self.users[user].writes:
            place, _ = self.users[user].writes.popitem()
            self.world.arena.abort(self.users[user].session, [place, place])

    @rule(user=who, first=which, count=st.integers(1, 4))
    def open_run(self, user: int, first: int, count: int) -> None:
        self.open(user, first, count)

    def open(self, user: int, first: int, count: int) -> None:
        blocks = BLOCKS[first : first + count]
        opened = self.world.arena.open(self.users[user].session, [b.key for b in blocks])
        places = [self.readable.get(block.key) for block in blocks]
        expected = places[: places.index(None)] if None in places else places
        assert [block.place for block in opened] == expected
        for at, block in enumerate(opened):
            self.users[user].leases.append((first + at, block.place))

    @rule(user=who, count=st.integers(1, 4))
    def release(self, user: int, count: int) -> None:
        given, self.users[user].leases = (
            self.users[user].leases[:count],
            self.users[user].leases[count:],
        )
        self.world.arena.release(self.users[user].session, [place for _, place in given])

    @rule(user=who)
    def die(self, user: int) -> None:
        self.world.arena.end(self.users[user].session)
        self.users[user] = User(self.world.arena.session("again"))

    @rule(block=which)
    def delete(self, block: int) -> None:
        self.world.arena.delete([BLOCKS[block].key])

    @rule(block=which)
    def purge(self, block: int) -> None:
        self.world.arena.purge(BLOCKS[block].scope)
        assert not any(b.key in self.readable for b in BLOCKS if b.scope == BLOCKS[block].scope)

    @rule(block=which, seconds=st.sampled_from([1.0, 15.0]))
    def pin(self, block: int, seconds: float) -> None:
        self.world.arena.pin([BLOCKS[block].key], seconds)

    @rule(block=which)
    def unpin(self, block: int) -> None:
        self.world.arena.unpin([BLOCKS[block].key])

    @rule(seconds=st.sampled_from([0.5, 6.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.arena.tick()

    @invariant()
    def books_agree(self) -> None:
        self.world.arena.check()
        assert {*self.world.arena.keys(b"", 99)} == {*self.readable}

    @invariant()
    def leased_memory_is_nobody_elses(self) -> None:
        slots = self.world.arena._table.slots
        for user in self.users:
            for block, place in user.leases:
                slot = slots[place.offset]
                assert (slot.key, slot.generation) == (BLOCKS[block].key, place.generation)

    def teardown(self) -> None:
        for user in self.users:
            self.world.arena.end(user.session)
        self.world.arena.purge(None)
        self.world.arena.check()
        stats = self.world.arena.stats()
        assert (stats.used_bytes, stats.pinned_bytes, stats.scopes) == (0, 0, [])


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
