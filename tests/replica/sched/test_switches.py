"""What is there for comparison: no prefix cache, static batches. Tokens never depend on it."""

from __future__ import annotations

import pytest

from tests.replica.sched.rig import Bench, sampling, tokens_of

PREFIX = tokens_of(1, 12)


@pytest.mark.parametrize("retract", [0, 3])
def test_without_a_prefix_cache_nothing_is_found_nor_told_nor_waited_for(retract: int) -> None:
    bench = Bench(total_blocks=64, prefix_cache=False, retract_every_steps=retract)
    together = [bench.add((*PREFIX, *tokens_of(seed, 5))) for seed in (2, 3)]
    plan = bench.step()
    assert plan is not None
    assert plan.rows[0].start == 0
    assert bench.scheduler.planner.later["cold_prefix"] == 0
    bench.run()
    later = bench.add((*PREFIX, *tokens_of(2, 5)))
    bench.run()
    bench.assert_right()
    assert [bench.cached(child) for child in (*together, later)] == [0, 0, 0]
    assert bench.scheduler.journal.drain() == []
    assert bench.scheduler.cache.available == 64


def test_without_a_prefix_cache_loads_from_below_still_count() -> None:
    bench = Bench(total_blocks=64, prefix_cache=False, tiered=True)
    child = bench.add((*PREFIX, *tokens_of(2, 5)))
    bench.run()
    bench.assert_right(child)


def test_a_static_batch_is_closed_by_its_first_token() -> None:
    bench = Bench(total_blocks=64, batching="static", max_step_tokens=8)
    first = bench.add(tokens_of(1, 12), sampling(4))
    bench.step()
    second = bench.add(tokens_of(2, 6), sampling(2))  # while the first is prefilled: joins
    while not bench.tokens(first) or not bench.tokens(second):
        bench.step()
    third = bench.add(tokens_of(3, 4), sampling(1))
    while bench.finish(first) is None:
        bench.step()
        assert not bench.tokens(third)
    assert bench.scheduler.planner.later["batch"] > 0
    bench.run()
    bench.assert_right()


def test_a_static_batch_is_preempted_and_resumed_like_any_other() -> None:
    bench = Bench(total_blocks=8, batching="static", retract_every_steps=3)
    for seed in range(4):
        bench.add(tokens_of(seed, 6), sampling(5))
    bench.run()
    bench.assert_right()
