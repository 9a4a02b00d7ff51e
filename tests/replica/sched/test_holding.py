"""Held requests: their KV is kept while that is cheap, then released; who costs too much ends."""

from __future__ import annotations

import pytest

from replica.sched.holding import ABORT_FACTOR
from replica.sched.plan import ChildId
from replica.sched.request import Request
from tests.replica.sched.rig import Bench, sampling, tokens_of

BLOCKS = 32


def crowded(wanted: int = 40, waits: bool = True) -> tuple[Bench, ChildId, ChildId]:
    """One that is held with 11 of 32 blocks, one that decodes, and one for which there is no room
    beside both of them."""
    bench = Bench(BLOCKS, 4, max_step_tokens=64, max_running=8, horizon_tokens=4)
    bench.runner.device_ms = lambda plan: 5.0 * plan.tokens
    held = bench.add(tokens_of(1, 40), sampling(wanted, ignore_eos=True))
    bench.step()
    bench.step()
    bench.scheduler.lifecycle.hold(held)
    runs = bench.add(tokens_of(2, 6), sampling(50, ignore_eos=True))
    bench.step()
    if waits:
        bench.add(tokens_of(3, 70), sampling(4))
    return bench, held, runs


def counts(bench: Bench) -> dict[str, int]:
    return {name: count for name, count in bench.scheduler.lifecycle.held.items() if count}


def until_released(bench: Bench, request: Request) -> None:
    """So many short steps as that takes."""
    for _ in range(200):
        if not request.blocks:
            return
        steps(bench, 1, 0.06)
    raise AssertionError("it keeps its blocks")


def steps(bench: Bench, count: int, step_s: float) -> None:
    """So many more, each of which takes so long."""
    for _ in range(count):
        bench.now_s += step_s - 1.0  # a step of the bench takes a second by itself
        bench.step()


def test_kv_that_nobody_wants_is_kept_for_as_long_as_it_takes() -> None:
    bench, held, _ = crowded(waits=False)
    steps(bench, 30, 10.0)
    request = bench.scheduler.table.get(held)
    assert request is not None
    assert request.blocks
    assert request.rent_ms == 0.0
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    assert counts(bench) == {"kept": 1}
    assert bench.outputs[held][-1].recomputed_tokens == 0
    bench.assert_right()
    bench.assert_empty()


def test_kv_is_released_once_it_has_cost_what_computing_it_again_would() -> None:
    bench, held, _ = crowded()
    request = bench.scheduler.table.get(held)
    assert request is not None
    again_ms = bench.scheduler.timing.prefill.predict_ms(0, request.committed)
    share = len(request.blocks) / BLOCKS
    bench.step()
    reviews = 0
    while request.blocks and reviews < 100:
        assert request.rent_ms == pytest.approx(reviews * 60.0 * share)
        assert request.rent_ms < again_ms
        steps(bench, 1, 0.06)
        reviews += 1
    assert reviews * 60.0 * share >= again_ms
    assert counts(bench) == {"released": 1}
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_what_is_released_was_published_and_is_found_again() -> None:
    bench, held, runs = crowded()
    request = bench.scheduler.table.get(held)
    assert request is not None
    until_released(bench, request)
    bench.scheduler.lifecycle.abort(ChildId(3))
    bench.scheduler.lifecycle.abort(runs)
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    assert bench.outputs[held][-1].recomputed_tokens <= 4
    bench.assert_right(held)
    bench.assert_empty()


def test_o5_who_is_slow_again_and_again_is_ended_and_costs_no_more_than_so_much() -> None:
    bench, held, runs = crowded(wanted=80, waits=False)
    bench.scheduler.lifecycle.abort(runs)
    request = bench.scheduler.table.get(held)
    assert request is not None
    lifecycle, holding = bench.scheduler.lifecycle, bench.scheduler._holding
    turns = 0
    while bench.finish(held) is None and turns < 20:
        turns += 1
        lifecycle.hold(held)
        while request.blocks:
            bench.now_s += 0.06
            holding.review(bench.now_s, BLOCKS, wanted=True)
            assert request.held_cost_ms <= ABORT_FACTOR * holding.anew_ms(request)
        bench.collect()
        lifecycle.resume(held)
        for _ in range(4):
            bench.step()
    error = bench.outputs[held][-1].error
    assert error is not None
    assert (error.status, error.code) == (503, "slow_reader")
    assert counts(bench) == {"released": turns - 1, "aborted": 1}
    assert turns > 1
    bench.assert_empty()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_row_in_flight_keeps_its_blocks_until_it_is_back(in_flight: bool) -> None:
    bench, held, _ = crowded()
    request = bench.scheduler.table.get(held)
    assert request is not None
    bench.scheduler.lifecycle.resume(held)
    plan = bench.plan()
    assert plan is not None
    bench.scheduler.lifecycle.hold(held)
    if not in_flight:
        bench.finish_step(plan)
    request.rent_ms = 1e9
    ahead = bench.scheduler.plan_ahead(bench.now_s + 0.1) if in_flight else bench.plan()
    if in_flight:
        assert request.state.name in ("DRAINING", "HELD", "ABORTING")
        bench.finish_step(plan)
    if ahead is not None and bench.scheduler.in_flight:
        bench.finish_step(ahead)
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    bench.assert_empty()


def test_what_others_share_costs_nothing_to_keep() -> None:
    bench = Bench(BLOCKS, 4, max_step_tokens=64, max_running=8, horizon_tokens=4)
    prompt = tokens_of(1, 40)
    bench.add(prompt, sampling(16, ignore_eos=True))
    for _ in range(2):
        bench.step()
    held = bench.add(prompt, sampling(16, ignore_eos=True))
    for _ in range(3):
        bench.step()
    bench.scheduler.lifecycle.hold(held)
    request = bench.scheduler.table.get(held)
    assert request is not None
    sole = bench.scheduler.cache.frees(request.blocks)
    assert 0 < sole <= 2 < len(request.blocks)
    bench.add(tokens_of(3, 90), sampling(4))
    bench.step()
    before_ms = request.rent_ms
    steps(bench, 1, 0.5)
    assert request.rent_ms - before_ms <= 500.0 * sole / BLOCKS + 1e-6
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    bench.assert_right()
