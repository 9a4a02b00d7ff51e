"""Where a run comes from: nearest first, holes bridged, and only where it beats computing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.cascade import Cascade
from kvstore.level import Level, Speed
from kvstore.verify import Verifier
from tests.fakes.memory_tier import MemoryTier
from tests.kvstore.blocks import BOOT, CLUSTER_KEY, LAYOUT, payload_of, run_of

FAR = 1e12
BLOCKS = run_of(8)
CHAIN = [block.key for block in BLOCKS]


def level_of(places: set[int], block_ms: float = 0.0, latency_ms: float = 0.0) -> Level:
    level = Level(MemoryTier(1 << 20), LAYOUT, Verifier(CLUSTER_KEY, LAYOUT), b"m" * 32)
    blocks = [BLOCKS[place] for place in sorted(places)]
    payloads = [memoryview(payload_of(block.index)) for block in blocks]
    level.write(blocks, payloads, BOOT, FAR)
    level.speed = Speed(latency_ms, LAYOUT.payload_bytes / block_ms if block_ms else 1e12)
    level.speed.asked = lambda took_ms: None  # type: ignore[method-assign]
    return level


def runs_of(cascade: Cascade, first: int = 0, compute_ms: float = 10.0) -> list[tuple[int, ...]]:
    plan = cascade.plan(CHAIN, first, lambda blocks: blocks * compute_ms, FAR)
    return [(cascade.levels.index(run.level), run.first, run.count) for run in plan]


def test_the_nearest_level_that_has_a_block_gives_it() -> None:
    cascade = Cascade([level_of({0, 1, 4, 5}), level_of({0, 1, 2, 3, 4, 7})])
    assert runs_of(cascade) == [(0, 0, 2), (1, 2, 3), (0, 5, 1)]
    assert runs_of(cascade, first=3) == [(1, 3, 2), (0, 5, 1)]
    assert runs_of(cascade, first=6) == []


def test_what_is_slower_than_computing_is_computed() -> None:
    near, far = level_of({0, 1, 2}, block_ms=1.0), level_of(set(range(8)), block_ms=9.0)
    assert runs_of(Cascade([near, far])) == [(0, 0, 3)]
    assert runs_of(Cascade([near, far]), compute_ms=20.0) == [(0, 0, 3), (1, 3, 5)]
    assert runs_of(Cascade([near, far]), compute_ms=1.0) == []


def test_a_dear_piece_is_fetched_for_what_lies_behind_it() -> None:
    near, far = level_of({2, 3, 4, 5, 6, 7}, block_ms=0.1), level_of({0, 1}, block_ms=9.0)
    assert runs_of(Cascade([near, far])) == [(1, 0, 2), (0, 2, 6)]


@given(
    near=st.sets(st.integers(0, 7)),
    far=st.sets(st.integers(0, 7)),
    first=st.integers(0, 7),
    costs=st.tuples(*[st.sampled_from([0.5, 6.0, 8.0, 20.0])] * 2),
)
def test_runs_are_a_gapless_prefix_that_saves_time(
    near: set[int], far: set[int], first: int, costs: tuple[float, float]
) -> None:
    cascade = Cascade([level_of(near, costs[0]), level_of(far, costs[1])])
    at, saved = first, 0.0
    for level, start, count in runs_of(cascade, first):
        assert start == at
        assert set(range(start, start + count)) <= (near, far)[level]
        at += count
        saved += count * (0.7 * 10.0 - costs[level])
    assert saved > 0 or at == first
