"""Blocks that somebody waits for, through the real threads: what is told is what is there."""

from __future__ import annotations

import pytest

from configs.schema import KvConfig
from kvstore.tier import Health
from replica.engine.messages import ChildOutput
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.slow_tier import SlowTier
from tests.replica.sched.rig import sampling, tokens_of
from tests.replica.tiers.rig import TieredRig, tiered
from tests.waiting import wait_until

PROMPT = tokens_of(1, 24)
"""Six full blocks."""


def written(rig: TieredRig, store: str, **fields: object) -> ChildOutput:
    child = rig.submit(PROMPT, sampling(1), write_to=store, **fields)
    return rig.sink.end_of(child)


def shared() -> SlowTier:
    """A host's store: its name is told, since others share it."""
    return SlowTier("host", trusted=False)


def name_of(rig: TieredRig) -> str:
    (name, *_) = rig.tiers.names
    assert name
    return name


def test_all_blocks_are_there_when_the_end_is_told() -> None:
    near = shared()
    with tiered(near) as (rig, _, _):
        end = written(rig, name_of(rig))
        assert (end.finish, end.token_ids, end.written_blocks) == ("length", (), 6)
        assert near.inner.stats().blocks == 6
        rig.assert_nothing_left()


def test_blocks_of_the_device_s_cache_that_the_store_lost_are_written_again() -> None:
    near = shared()
    with tiered(near) as (rig, _, _):
        rig.run(PROMPT)
        rig.settle()
        near.inner.delete([write.key for write in near.written[2:5]])
        end = written(rig, name_of(rig))
        assert (end.cached_tokens, end.written_blocks) == (20, 6)


def test_the_remote_store_gets_them_on_their_first_use() -> None:
    near, far = SlowTier(), SlowTier("far", trusted=False)
    with tiered(near, far) as (rig, _, _):
        assert written(rig, rig.tiers.names[1]).written_blocks == 6
        assert far.inner.stats().blocks == 6


def test_an_unknown_store_gets_nothing() -> None:
    with tiered(MemoryTier(1 << 24)) as (rig, _, _):
        assert written(rig, "somebody else's").written_blocks == 0
        rig.assert_nothing_left()


def test_a_store_that_is_away_ends_it_at_once() -> None:
    near = shared()
    with tiered(near) as (rig, _, _):
        near.state = Health.OPEN
        assert written(rig, name_of(rig)).written_blocks == 0
        rig.assert_nothing_left()


def test_K2_a_store_that_hangs_ends_it_at_its_deadline() -> None:
    near = shared()
    kv = KvConfig(check_one_in=0, staging_bytes=16 << 10, write_deadline_ms=50.0)
    with tiered(near, kv=kv) as (rig, _, _):
        near.put_gate.clear()
        assert written(rig, name_of(rig)).written_blocks == 0
        near.put_gate.set()
        rig.assert_nothing_left()


def test_a_forgotten_write_still_has_its_end() -> None:
    near = shared()
    with tiered(near) as (rig, _, _):
        near.put_gate.clear()
        child = rig.submit(PROMPT, sampling(1), write_to=name_of(rig))
        rig.tiers.outbound.forget()
        near.put_gate.set()
        assert rig.sink.end_of(child).finish == "length"
        rig.assert_nothing_left()


@pytest.mark.parametrize("far", [False, True])
def test_K1_who_leaves_while_its_blocks_wait_to_be_written_gives_them_back_at_once(
    far: bool,
) -> None:
    """Behind a write that hangs, which keeps its own blocks until it has left them."""
    near, remote = shared(), SlowTier("far", trusted=False)
    slow = remote if far else near
    with tiered(near, remote) as (rig, runner, _):
        cache, store = rig.engine.scheduler.cache, rig.tiers.names[far]
        slow.put_gate.clear()
        first = rig.submit(PROMPT, sampling(1), write_to=store)
        wait_until(lambda: rig.engine.scheduler.table.writing)
        others = [rig.submit(tokens_of(9 + n, 24), sampling(1), write_to=store) for n in range(3)]
        wait_until(lambda: len(rig.engine.scheduler.table.writing) == 4)
        for child in others:
            rig.engine.abort(child)
        assert {rig.sink.end_of(child).finish for child in others} == {"abort"}
        wait_until(lambda: len(rig.engine.scheduler.table) == 1)
        assert cache.available == rig.engine.scheduler.limits.total_blocks - 6
        slow.put_gate.set()
        assert rig.sink.end_of(first).written_blocks == 6
        rig.assert_right(runner, rig.submit(PROMPT))
        rig.assert_nothing_left()
