"""Who writes, who reads, who has to leave (K2, K5, K6, K8, C5)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Finished, Place, Refusal
from kvstore.identity import PUBLIC_SCOPE
from tests.kvstore.arena.users import LARGE, LARGER, World, header, run_of

FEW = ArenaLimits(scope_share=1.0)


def test_a_block_is_seen_after_its_commit_only_and_has_one_writer() -> None:
    world, block = World(), run_of(1)[0]
    one, other = world.arena.session("one"), world.arena.session("other")
    place = world.reserve(one, block)
    assert isinstance(place, Place)
    assert world.arena.open(other, [block.key]) == []
    assert world.reserve(other, block) is Refusal.BUSY
    assert not world.commit(other, block, place)
    assert world.commit(one, block, place)
    assert not world.commit(one, block, place)
    assert world.reserve(other, block) is Refusal.PRESENT
    assert [opened.place for opened in world.arena.open(other, [block.key])] == [place]
    world.arena.check()


def test_a_commit_under_a_wrong_header_frees_the_slot() -> None:
    world, (block, wrong) = World(), run_of(2)
    session = world.arena.session("s")
    for bad in (header(wrong), header(block, LARGER), b"no header", header(run_of(1, 9)[0])):
        place = world.reserve(session, block)
        assert isinstance(place, Place)
        assert world.arena.commit(session, [Finished(place, bad, None)]) == [False]
        assert world.arena.stats().used_bytes == 0
    assert world.arena.stats().bad_commits == 4
    world.arena.check()


def test_open_stops_at_the_first_hole() -> None:
    world, blocks = World(), run_of(4)
    session = world.arena.session("s")
    for block in (blocks[0], blocks[1], blocks[3]):
        world.store(session, block)
    keys = [block.key for block in blocks]
    assert len(world.arena.open(session, keys)) == 2
    assert world.arena.exists_prefix(keys) == 2
    assert world.arena.exists_prefix(keys[3:]) == 1


def test_the_oldest_leave_and_the_tail_of_a_run_before_its_head() -> None:
    world, run, more = World(4, FEW), run_of(4), run_of(6, seed=1)
    session = world.arena.session("s")
    for block in (*run, *more[:4]):
        world.store(session, block)
    opened = world.arena.open(session, [block.key for block in run])
    world.arena.release(session, [block.place for block in opened])
    for block in more[4:]:
        world.store(session, block)
    assert world.arena.exists_prefix([more[0].key]) == world.arena.exists_prefix([more[1].key]) == 0
    for block in run_of(4, seed=2):
        world.store(session, block)
    assert world.arena.exists_prefix([block.key for block in run]) == 2
    world.arena.check()


def test_what_is_read_or_pinned_does_not_leave() -> None:
    world, blocks = World(1, ArenaLimits(scope_share=1.0, pinned_share=0.5)), run_of(2)
    session = world.arena.session("s")
    for block in blocks:
        world.store(session, block)
    assert world.arena.pin([block.key for block in blocks], 10.0) == 1
    assert len(world.arena.open(session, [blocks[1].key])) == 1
    more = run_of(1, salt=b"another")[0]
    assert world.reserve(session, more) is Refusal.FULL
    world.now = 10.0
    world.arena.tick()
    world.store(session, more)
    assert world.arena.exists_prefix([blocks[0].key]) == 0
    world.arena.check()
    assert world.arena.stats().pinned_bytes == 0


def test_a_block_is_in_use_until_its_last_reader_has_left() -> None:
    world, block, others = World(1, FEW), run_of(1)[0], run_of(4, seed=1)
    session, other = world.arena.session("s"), world.arena.session("o")
    place = world.store(session, block)
    for reader in (session, session, other):
        assert len(world.arena.open(reader, [block.key])) == 1
    for reader in (session, other):
        world.arena.release(reader, [place])
        world.arena.check()
    for more in others:
        world.store(session, more)
    assert world.arena.exists_prefix([block.key]) == 1
    world.arena.release(session, [place])
    world.store(session, run_of(1, seed=2)[0])
    world.store(session, run_of(1, seed=3)[0])
    assert world.arena.exists_prefix([block.key]) == 0
    world.arena.check()


def test_unpinned_blocks_may_leave_again() -> None:
    world, block = World(1, FEW), run_of(1)[0]
    session = world.arena.session("s")
    world.store(session, block)
    world.arena.pin([block.key], 100.0)
    world.arena.unpin([block.key])
    for other in run_of(2, seed=1):
        world.store(session, other)
    assert world.arena.exists_prefix([block.key]) == 0
    world.arena.check()


def test_another_layout_takes_whole_extents_of_older_blocks() -> None:
    world, old, new = World(2, FEW), run_of(4), run_of(2, seed=1)
    session = world.arena.session("s")
    for block in old:
        world.store(session, block)
    for block in new:
        world.store(session, block, LARGER)
    assert world.arena.exists_prefix([block.key for block in new]) == 2
    assert world.arena.stats().blocks == 2
    world.arena.check()


def test_C5_one_tenant_evicts_its_own_blocks_and_not_its_neighbours() -> None:
    world = World(4, ArenaLimits(scope_share=0.25))
    mine, theirs = run_of(6, salt=b"a"), run_of(2, salt=b"b")
    session = world.arena.session("s")
    for block in (*theirs, *mine):
        world.store(session, block)
    held = world.arena.open(session, [theirs[0].key, theirs[1].key])
    assert len(held) == 2
    use = {scope.scope: scope for scope in world.arena.stats().scopes}
    assert use[mine[0].scope.hex()].used_bytes == use[mine[0].scope.hex()].quota_bytes == 1 << 20
    assert world.reserve(session, run_of(3, salt=b"b")[2]) is Refusal.QUOTA
    assert world.arena.exists_prefix([mine[4].key, mine[5].key]) == 2


def test_public_blocks_may_fill_the_arena() -> None:
    world, blocks = World(1, ArenaLimits(scope_share=0.5)), run_of(2, salt=b"")
    session = world.arena.session("s")
    for block in blocks:
        assert block.scope == PUBLIC_SCOPE
        world.store(session, block)
    assert world.arena.stats().blocks == 2


def test_K8_a_ttl_ends_on_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (block, other) = World(), run_of(2)
    session = world.arena.session("s")
    world.store(session, block, ttl_s=10.0)
    world.store(session, other)
    for step in (3600.0, -3600.0):
        moved = time.time() + step
        monkeypatch.setattr(time, "time", lambda moved=moved: moved)
        monkeypatch.setattr(time, "time_ns", lambda moved=moved: int(moved * 1e9))
        world.arena.tick()
        assert world.arena.exists_prefix([block.key]) == 1
    world.now = 10.0
    world.arena.tick()
    assert world.arena.stats().expired == 1
    assert world.arena.exists_prefix([other.key]) == 1


def test_K2_the_end_of_a_session_gives_everything_back() -> None:
    world, blocks = World(), run_of(4)
    dead, living = world.arena.session("dead"), world.arena.session("living")
    world.store(living, blocks[0])
    before = world.arena.stats().used_bytes
    assert len(world.arena.open(dead, [blocks[0].key])) == 1
    places = [world.reserve(dead, block) for block in blocks[1:]]
    world.arena.end(dead)
    world.arena.end(dead)
    world.arena.check()
    stats = world.arena.stats()
    assert (stats.used_bytes, stats.leased, stats.writing, stats.reaped) == (before, 0, 0, 4)
    assert isinstance(world.reserve(living, blocks[1]), Place)
    late = places[0]
    assert isinstance(late, Place)
    assert not world.commit(dead, blocks[1], late)
    assert world.reserve(dead, blocks[2]) is Refusal.LIMIT


def test_a_late_writer_is_quarantined_until_it_is_known_to_have_stopped() -> None:
    world, block = World(limits=ArenaLimits(write_s=5.0)), run_of(1)[0]
    slow, quick = world.arena.session("slow"), world.arena.session("quick")
    place = world.reserve(slow, block)
    assert isinstance(place, Place)
    world.now = 5.0
    assert world.arena.tick() == [slow]
    assert world.arena.tick() == []
    taken = world.store(quick, block)
    assert taken.offset != place.offset
    assert world.arena.stats().quarantined == 1
    world.arena.check()
    assert not world.commit(slow, block, place)
    assert world.arena.stats().quarantined == 0
    world.arena.check()


def test_K5_a_block_that_is_forgotten_while_it_is_read_keeps_its_memory() -> None:
    world, block = World(1, ArenaLimits(scope_share=1.0, lease_s=0.5)), run_of(1)[0]
    reader, writer = world.arena.session("reader"), world.arena.session("writer")
    world.store(writer, block)
    (opened,) = world.arena.open(reader, [block.key])
    world.now = 1.0
    assert world.arena.tick() == [reader]
    assert world.arena.delete([block.key]) == 1
    others = [world.reserve(writer, other) for other in run_of(3, seed=1)]
    offsets = [place.offset for place in others if isinstance(place, Place)]
    assert opened.place.offset not in offsets
    assert world.arena.segment.generation(opened.place.offset) != opened.place.generation
    assert world.arena.stats().dying == 1
    world.arena.release(reader, [opened.place])
    world.arena.check()
    again = world.reserve(writer, run_of(4, seed=1)[3])
    assert isinstance(again, Place)
    assert again.offset == opened.place.offset
    assert again.generation != opened.place.generation
    world.arena.release(reader, [opened.place])
    world.arena.check()


def test_what_one_user_may_hold_has_a_bound() -> None:
    limits = ArenaLimits(scope_share=1.0, session_writes=2, session_leases=1)
    world, blocks = World(4, limits), run_of(4)
    session = world.arena.session("s")
    places = [world.reserve(session, block) for block in blocks]
    assert places[2:] == [Refusal.LIMIT] * 2
    for block, place in zip(blocks[:2], places, strict=False):
        assert isinstance(place, Place)
        assert world.commit(session, block, place)
    assert len(world.arena.open(session, [block.key for block in blocks])) == 1


def test_listeners_hear_each_change_once() -> None:
    world, blocks = World(1, FEW), run_of(3)
    session = world.arena.session("s")
    world.store(session, blocks[0])
    resident: set[bytes] = set()

    def changed(stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        assert resident.isdisjoint(stored)
        assert resident.issuperset(removed)
        resident.update(stored)
        resident.difference_update(removed)

    world.arena.subscribe(changed)
    for block in blocks[1:]:
        world.store(session, block)
    assert resident == {block.key for block in blocks[1:]} == {*world.arena.keys(b"", 9)}
    world.arena.purge(blocks[0].scope)
    assert resident == set()
    world.arena.unsubscribe(changed)
    world.store(session, blocks[0])
    assert resident == set()


def test_timers_do_not_grow_with_the_blocks_that_came_and_went() -> None:
    world, block = World(1, FEW), run_of(1)[0]
    session = world.arena.session("s")
    for _ in range(1_500):
        world.store(session, block, ttl_s=1e6)
        world.arena.delete([block.key])
        world.arena.tick()
    assert len(world.arena._table.timers) < 1_100
    assert LARGE.payload_bytes == 1 << 19
