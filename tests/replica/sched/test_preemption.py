"""Preemption: from the far end, useful at once, bounded, and resumed mostly from the cache."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.replica.sched.rig import Bench, sampling, tokens_of


def test_the_last_in_order_gives_way_and_resumes_from_the_cache() -> None:
    bench = Bench(total_blocks=8, block_tokens=4, horizon_tokens=1)
    first = bench.add(tokens_of(1, 9), sampling(20))
    second = bench.add(tokens_of(2, 9), sampling(20))
    bench.run()
    assert bench.scheduler.lifecycle.preemptions >= 1
    assert bench.outputs[first][-1].recomputed_tokens == 0
    bench.assert_right()
    bench.assert_empty()
    assert bench.cached(second) == 0


def test_what_was_committed_is_found_again_when_room_is_left() -> None:
    bench = Bench(total_blocks=32, block_tokens=4)
    child = bench.add(tokens_of(1, 17), sampling(12))
    for _ in range(6):
        bench.step()
    request = bench.scheduler.table.get(child)
    assert request is not None
    committed = request.committed
    bench.scheduler.lifecycle.preempt(request)
    bench.run()
    assert bench.outputs[child][-1].recomputed_tokens == committed % 4
    bench.assert_right()
    bench.assert_empty()


def test_a_preempted_request_with_a_row_in_flight_drains_and_keeps_its_token() -> None:
    for then in ("nothing", "hold", "abort"):
        bench = Bench()
        child = bench.add(tokens_of(1, 6), sampling(9))
        bench.step()
        plan = bench.plan()
        assert plan is not None
        request = bench.scheduler.table.get(child)
        assert request is not None
        bench.scheduler.lifecycle.preempt(request)
        assert request.state.name == "DRAINING"
        if then != "nothing":
            getattr(bench.scheduler.lifecycle, then)(child)
        bench.finish_step(plan)
        assert len(bench.tokens(child)) == (1 if then == "abort" else 2)
        assert not request.blocks
        bench.scheduler.lifecycle.resume(child)
        bench.run()
        if then != "abort":
            bench.assert_right()
        bench.assert_empty()


@pytest.mark.parametrize("horizon_tokens", [1, 2, 8])
@pytest.mark.parametrize("total_blocks", [12, 16, 23])
def test_ping_pong_is_bounded(horizon_tokens: int, total_blocks: int) -> None:
    bench = Bench(total_blocks, 4, horizon_tokens=horizon_tokens, max_step_tokens=64)
    for seed in range(10):
        bench.add(tokens_of(seed, 7), sampling(40))
    most = Counter[int]()
    while bench.scheduler.runnable:
        before = bench.scheduler.lifecycle.preemptions
        waiting = {request.child for request in bench.scheduler.table.waiting}
        plan = bench.step()
        if bench.scheduler.lifecycle.preemptions > before:
            assert plan is not None
            assert not waiting & {row.child for row in plan.rows}
        for request in bench.scheduler.table:
            most[request.child] = max(most[request.child], request.preemptions)
    assert bench.scheduler.lifecycle.preemptions > 0
    # Between two of its preemptions somebody ahead of it has ended.
    assert all(count < child for child, count in most.items())
    bench.assert_right()
    bench.assert_empty()


def test_with_the_default_horizon_short_answers_are_never_preempted() -> None:
    bench = Bench(16, 4, max_step_tokens=64)
    for seed in range(12):
        bench.add(tokens_of(seed, 7), sampling(30))
    bench.run()
    assert bench.scheduler.lifecycle.preemptions == 0
    bench.assert_right()


def test_a_request_that_outgrows_the_pool_alone_gets_a_clear_error() -> None:
    bench = Bench(total_blocks=4, block_tokens=4)
    big = bench.add(tokens_of(1, 10), sampling(50))
    small = bench.add(tokens_of(2, 5), sampling(3))
    bench.run()
    last = bench.outputs[big][-1]
    assert last.finish == "error"
    assert last.error is not None
    assert last.error.code == "context_length_exceeded"
    assert "16" in last.error.message
    # 16 positions of KV, and one token more that was sampled behind the last of them.
    assert bench.tokens(big) == bench.wanted(big)[:7]
    bench.assert_right(small)
    bench.assert_empty()


def test_two_that_share_the_whole_pool_do_not_wait_for_each_other() -> None:
    bench = Bench(total_blocks=5, block_tokens=4, horizon_tokens=1)
    prompt = tokens_of(1, 16)
    first = bench.add((*prompt, 1), sampling(30))
    second = bench.add((*prompt, 2), sampling(3))
    third = bench.add((*prompt, 3), sampling(2))
    bench.run()
    assert bench.finish(first) == "error"
    bench.assert_right(second, third)
    bench.assert_empty()


def test_victims_that_share_blocks_only_with_each_other_are_of_use() -> None:
    bench = Bench(total_blocks=6, block_tokens=4, horizon_tokens=1, max_step_tokens=64)
    first = bench.add(tokens_of(1, 4), sampling(14))
    bench.step()
    shared = tokens_of(2, 8)
    twins = [bench.add((*shared, seed), sampling(2)) for seed in (1, 2)]
    for twin in twins:
        bench.step()
        bench.scheduler.lifecycle.hold(twin)
    bench.run()
    bench.assert_right(first)
    for twin in twins:
        bench.scheduler.lifecycle.resume(twin)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_a_late_arrival_never_takes_from_an_earlier_one() -> None:
    bench = Bench(total_blocks=10, block_tokens=4, horizon_tokens=1, max_step_tokens=64)
    early = bench.add(tokens_of(1, 12), sampling(20))
    for seed in range(2, 7):
        bench.add(tokens_of(seed, 6), sampling(16))
    bench.run()
    assert bench.outputs[early][-1].recomputed_tokens == 0
    finished = [
        output.scheduled_s for output in (bench.outputs[child][-1] for child in range(2, 7))
    ]
    assert finished == sorted(finished)
    bench.assert_right()


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    bench = Bench(total_blocks=16, block_tokens=4, max_running=2)
    first, second = (bench.add(tokens_of(seed, 5), sampling(6)) for seed in (1, 2))
    third = bench.add(tokens_of(3, 5), sampling(6))
    bench.step()
    request = bench.scheduler.table.get(second)
    assert request is not None
    bench.scheduler.lifecycle.preempt(request)
    plan = bench.step()
    assert plan is not None
    assert [row.child for row in plan.rows] == [first, second]
    bench.run()
    bench.assert_right(first, second, third)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_retraction_every_few_steps_costs_time_but_no_token(every: int, overlapped: bool) -> None:
    bench = Bench(total_blocks=64, eos=3, retract_every_steps=every)
    for seed in range(6):
        bench.add(tokens_of(seed % 3, 9), sampling(14), seed=seed)
    bench.run_overlapped() if overlapped else bench.run()
    assert bench.scheduler.lifecycle.preemptions > 2
    bench.assert_right()
    bench.assert_empty()


def test_the_victim_frees_most_for_what_it_costs_within_its_class() -> None:
    bench = Bench(total_blocks=200, block_tokens=4, max_step_tokens=400)
    shared = tokens_of(9, 40)
    cheap = bench.add(tokens_of(1, 40), sampling(50))
    bench.add(shared, sampling(50))
    bench.step()
    # It frees more blocks than the cheap one, but its whole prompt would be computed again.
    dear = bench.add((*shared, *tokens_of(2, 48)), sampling(50))
    urgent = bench.add(tokens_of(3, 4), sampling(50), priority=1)
    for _ in range(3):
        bench.step()
    running = bench.scheduler.table.running
    assert running[0].child == urgent
    assert running[-1].child == dear
    victim = bench.scheduler.planner._victim(0)
    assert victim is not None
    assert victim.child == cheap
    bench.run()
    bench.assert_right()


def test_of_what_runs_the_lowest_priority_gives_way_however_little_it_frees() -> None:
    bench = Bench(total_blocks=200, block_tokens=4, max_step_tokens=400)
    bench.add(tokens_of(1, 4), sampling(50), priority=2)
    for seed, priority, length in ((2, 1, 200), (3, 0, 4), (4, 1, 200)):
        bench.add(tokens_of(seed, length), sampling(50), priority=priority)
    for _ in range(3):
        bench.step()
    victim = bench.scheduler.planner._victim(0)
    assert victim is not None
    assert victim.spec.priority == 0


def test_whoever_gave_way_is_spared_while_others_have_not() -> None:
    bench = Bench(total_blocks=200, block_tokens=4, max_step_tokens=400)
    _, second, third = (bench.add(tokens_of(seed, 20), sampling(50)) for seed in (1, 2, 3))
    for wanted in (third, second, third):
        for _ in range(3):
            bench.step()
        victim = bench.scheduler.planner._victim(0)
        assert victim is not None
        assert victim.child == wanted
        bench.scheduler.lifecycle.preempt(victim)
    bench.run()
    bench.assert_right()


def test_one_more_than_there_are_seats_and_no_block_left_is_no_deadlock() -> None:
    """Whoever resumes needs no seat. The only one went to the second, who finds no block and can't
    take from the first, who has some and wasn't asked."""
    bench = Bench(8, 3, max_step_tokens=3, max_running=1)
    first = bench.add(tokens_of(1, 12), sampling(4))
    for _ in range(3):
        bench.step()
    bench.scheduler.lifecycle.hold(first)
    second = bench.scheduler.table.get(bench.add(tokens_of(2, 9), sampling(12)))
    assert second is not None
    while second.computed < 15:
        bench.step()
    bench.scheduler.lifecycle.resume(first)
    assert bench.scheduler.cache.available == 0
    bench.run()
    bench.assert_right()
    bench.assert_empty()
