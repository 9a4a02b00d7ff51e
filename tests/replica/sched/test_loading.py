"""Blocks from the tiers below: waited for, used as far as they came, never in anybody's way."""

from __future__ import annotations

from itertools import permutations

import pytest

from events.errors import InvariantError
from replica.sched.draft import LEAST_FOUND_BLOCKS
from replica.sched.invariants import check_scheduler
from replica.sched.plan import ChildId
from replica.sched.request import State
from tests.fakes.tiers import FakeTiers
from tests.replica.sched.rig import Bench, sampling, tokens_of

PROMPT = tokens_of(1, 22)
"""Five full blocks and a rest."""


def evicted(**settings: object) -> tuple[Bench, FakeTiers]:
    """A bench whose pool has lost PROMPT's blocks, while the tiers have them."""
    bench = Bench(**{"total_blocks": 10, "max_step_tokens": 8, **settings}, tiered=True)
    bench.add(PROMPT)
    bench.run()
    bench.scheduler.clear_cache()
    assert bench.tiers is not None
    return bench, bench.tiers


def state(bench: Bench, child: ChildId) -> State | None:
    request = bench.scheduler.table.get(child)
    return None if request is None else request.state


def test_blocks_that_the_pool_lost_come_back_without_computing() -> None:
    bench, tiers = evicted()
    child = bench.add(PROMPT)
    assert tiers.ahead[-1] == child
    assert bench.plan() is None
    assert state(bench, child) is State.LOADING
    tiers.finish(child)
    plan = bench.step()
    assert plan is not None
    assert plan.tokens == len(PROMPT) - 20
    bench.run()
    bench.assert_right()
    assert bench.cached(child) == 20
    assert set(bench.specs[child].chain) <= set(bench.scheduler.cache.nodes())


@pytest.mark.parametrize("came", range(6))
def test_C11_a_load_counts_as_far_as_it_came(came: int) -> None:
    bench, tiers = evicted()
    child = bench.add(PROMPT)
    bench.plan()
    assert tiers.finish(child, came) == came
    bench.run()
    bench.assert_right()
    assert bench.cached(child) == 4 * came
    bench.assert_empty()


def test_what_the_device_still_has_is_not_loaded() -> None:
    bench, tiers = evicted()
    first = bench.add(PROMPT[:9])
    bench.plan()
    tiers.finish(first)
    bench.run()
    child = bench.add(PROMPT)
    bench.plan()
    wanted, blocks = tiers.open[child]
    assert (wanted.first, len(blocks)) == (2, 3)
    assert wanted.chain == tuple(bench.specs[child].chain)
    assert tiers.uses[-2:] == list(bench.specs[child].chain)[:2]
    bench.run()
    bench.assert_right()


def test_others_run_while_one_loads() -> None:
    bench, _ = evicted()
    child = bench.add(PROMPT)
    bench.plan()
    other = bench.add(tokens_of(9, 6))
    while bench.finish(other) is None:
        assert bench.step() is not None
    bench.assert_right(other)
    assert state(bench, child) is State.LOADING
    bench.run()
    bench.assert_right(child)


def test_one_that_finds_many_blocks_and_loads_keeps_nobody_from_the_only_step() -> None:
    bench = Bench(4_000, 4, max_step_tokens=8_000, context_tokens=1 << 20, tiered=True)
    bench.runner.device_ms = lambda plan: 1.0
    head = tokens_of(2, 4 * LEAST_FOUND_BLOCKS)
    for prompt in (head, (*head, *PROMPT)):
        bench.add(prompt, sampling(1))
        bench.run()
    bench.scheduler.clear_cache()
    bench.add(head, sampling(1))
    bench.plan()
    assert bench.tiers is not None
    (child,) = bench.tiers.open
    bench.tiers.finish(child)
    bench.run()
    loading = bench.add((*head, *PROMPT), sampling(1))
    found = bench.add((*head, 7), sampling(1))
    plan = bench.step()
    assert plan is not None
    assert state(bench, loading) is State.LOADING
    assert [row.child for row in plan.rows] == [found]


def test_a_sibling_waits_for_the_load_and_shares_it() -> None:
    bench, tiers = evicted()
    first = bench.add(PROMPT)
    bench.plan()
    second = bench.add(PROMPT)
    assert bench.plan() is None
    assert state(bench, second) is State.QUEUED
    tiers.finish(first)
    bench.run()
    bench.assert_right()
    assert not tiers.open
    assert bench.cached(second) == 20


def test_K1_blocks_of_an_aborted_load_are_nobody_elses_before_its_end() -> None:
    bench, tiers = evicted(total_blocks=7)
    child = bench.add(PROMPT)
    bench.plan()
    _, blocks = tiers.open[child]
    bench.scheduler.lifecycle.abort(child)
    bench.collect()
    assert bench.finish(child) == "abort"
    victim = bench.add(tokens_of(5, 7), sampling(9))
    for _ in range(6):
        plan = bench.step()
        if plan is not None:
            assert not set(plan.rows[0].block_ids) & set(blocks)
    assert bench.finish(victim) is None
    tiers.finish(child)
    bench.run()
    bench.assert_right(victim)
    bench.assert_empty()


def test_a_late_or_second_terminal_event_is_loud() -> None:
    bench, tiers = evicted()
    child = bench.add(PROMPT)
    bench.plan()
    tiers.finish(child)
    with pytest.raises(InvariantError):
        bench.scheduler.landed(child, 0)
    with pytest.raises(InvariantError):
        bench.scheduler.landed(ChildId(99), 0)


@pytest.mark.parametrize("order", list(permutations(("abort", "expire", "land"))))
def test_K3_abort_deadline_and_landing_in_every_order(order: tuple[str, ...]) -> None:
    bench, tiers = evicted()
    child = bench.add(PROMPT, deadline_s=100.0)
    bench.plan()
    for event in order:
        if event == "abort":
            bench.scheduler.lifecycle.abort(child)
        elif event == "expire":
            bench.scheduler.expire(101.0)
        else:
            tiers.finish(child)
        bench.collect()
        check_scheduler(bench.scheduler)
    first = min(("abort", "expire"), key=order.index)
    assert bench.finish(child) == {"abort": "abort", "expire": "error"}[first]
    assert child in tiers.dropped
    bench.assert_empty()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_held_request_lands_and_stays_held(resumed: bool) -> None:
    bench, tiers = evicted()
    child = bench.add(PROMPT)
    bench.plan()
    bench.scheduler.lifecycle.hold(child)
    if resumed:
        bench.scheduler.lifecycle.resume(child)
    assert state(bench, child) is State.LOADING
    tiers.finish(child)
    assert state(bench, child) is (State.RUNNING if resumed else State.HELD)
    bench.scheduler.lifecycle.resume(child)
    bench.run()
    bench.assert_right()


def test_a_full_pool_waits_for_a_load_and_says_no_to_nobody() -> None:
    bench, tiers = evicted(total_blocks=8, horizon_tokens=1)
    runner = bench.add(tokens_of(4, 4), sampling(20))
    bench.step()
    child = bench.add(PROMPT, sampling(1))
    bench.step()
    assert state(bench, child) is State.LOADING
    for _ in range(12):
        bench.step()
    assert bench.finish(runner) is None
    assert bench.plan() is None
    tiers.finish(child)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_whoever_skips_the_cache_loads_nothing() -> None:
    bench, tiers = evicted()
    ahead = len(tiers.ahead)
    bench.add(PROMPT, skip_cache_read=True)
    bench.run()
    bench.assert_right()
    assert len(tiers.ahead) == ahead


def families(bench: Bench, count: int) -> list[tuple[int, ...]]:
    """Prompts that the pool has lost, while the tiers have them."""
    prompts = [tokens_of(seed, 13) for seed in range(20, 20 + count)]
    for prompt in prompts:
        bench.add(prompt)
        bench.run()
    bench.scheduler.clear_cache()
    return prompts


def test_only_so_many_load_at_once_while_others_compute() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=8, tiered=True, max_loads=2)
    prompts = families(bench, 4)
    busy = bench.add(tokens_of(9, 6), sampling(30))
    bench.step()
    children = [bench.add(prompt) for prompt in prompts]
    quick = bench.add(tokens_of(8, 6), sampling(1))
    bench.step()
    assert [state(bench, child) for child in children] == [State.LOADING] * 2 + [State.QUEUED] * 2
    assert bench.scheduler.planner.later["transfers"] > 0
    while bench.finish(quick) is None:
        assert bench.step() is not None
    assert bench.tiers is not None
    bench.tiers.finish(children[0])
    bench.step()
    assert state(bench, children[2]) is State.LOADING
    assert state(bench, children[3]) is State.QUEUED
    bench.run()
    bench.assert_right(busy, quick, *children)
    assert all(bench.cached(child) == 12 for child in children)
    bench.assert_empty()


def test_nobody_waits_for_room_to_load_on_an_idle_device() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=8, tiered=True, max_loads=1)
    first, second = families(bench, 2)
    loading, computed = bench.add(first), bench.add(second)
    plan = bench.step()
    assert plan is not None
    assert [row.child for row in plan.rows] == [computed]
    assert state(bench, loading) is State.LOADING
    bench.run()
    bench.assert_right(loading, computed)
    assert (bench.cached(loading), bench.cached(computed)) == (12, 0)
    bench.assert_empty()
