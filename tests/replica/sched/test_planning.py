"""Budgets, service order, chunks, ends, and what is refused at intake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from events.errors import InvariantError
from replica.sched.order import StaticPolicy, Task
from replica.sched.plan import ExecutionPlan, PlanId
from tests.replica.sched.rig import Bench, chain_of, sampling, tokens_of


def shape(plan: ExecutionPlan | None) -> dict[int, int]:
    """Tokens per child."""
    assert plan is not None
    return {row.child: len(row.token_ids) for row in plan.rows}


def test_decodes_come_first_then_prefills_share_the_rest() -> None:
    bench = Bench(max_step_tokens=10, total_blocks=64)
    decoding = [bench.add(tokens_of(seed, 3), sampling(9)) for seed in range(3)]
    bench.step()
    first, second = bench.add(tokens_of(11, 12)), bench.add(tokens_of(12, 12))
    assert shape(bench.step()) == {**dict.fromkeys(decoding, 1), first: 7}
    assert shape(bench.step()) == {**dict.fromkeys(decoding, 1), first: 5, second: 2}
    bench.run()
    bench.assert_right()


def test_a_middle_chunk_is_never_sampled() -> None:
    bench = Bench(max_step_tokens=4)
    child = bench.add(tokens_of(1, 10))
    samples = []
    for _ in range(3):
        plan = bench.step()
        assert plan is not None
        samples.append(plan.rows[0].sample is not None)
    assert samples == [False, False, True]
    assert len(bench.outputs[child]) == 1


def test_priority_then_arrival_and_a_late_number_waits() -> None:
    bench = Bench(max_step_tokens=4, max_running=1)
    late = bench.add(tokens_of(1, 4), sampling(1), arrival_s=9.0)
    early = bench.add(tokens_of(2, 4), sampling(1), arrival_s=5.0)
    urgent = bench.add(tokens_of(3, 4), sampling(1), arrival_s=7.0, priority=1)
    order = [child for _ in range(3) for child in shape(bench.step())]
    assert order == [urgent, early, late]


def test_no_more_rows_than_seats() -> None:
    bench = Bench(max_running=2, max_step_tokens=50, total_blocks=64)
    children = [bench.add(tokens_of(seed, 3), sampling(3)) for seed in range(5)]
    assert list(shape(bench.step())) == children[:2]
    assert bench.run() <= 12
    bench.assert_right()


def test_held_children_are_not_planned_and_come_back() -> None:
    bench = Bench(total_blocks=64)
    running, waiting = bench.add(tokens_of(1, 5), sampling(6)), None
    bench.step()
    waiting = bench.add(tokens_of(2, 5))
    lifecycle = bench.scheduler.lifecycle
    for child in (running, waiting):
        lifecycle.hold(child)
        lifecycle.hold(child)
    assert not bench.scheduler.runnable
    assert bench.step() is None
    lifecycle.resume(running)
    assert list(shape(bench.step())) == [running]
    lifecycle.resume(waiting)
    lifecycle.resume(waiting)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_a_held_child_s_blocks_go_to_those_who_can_run() -> None:
    bench = Bench(total_blocks=4, block_tokens=4)
    held = bench.add(tokens_of(1, 12), sampling(3))
    bench.step()
    bench.scheduler.lifecycle.hold(held)
    other = bench.add(tokens_of(2, 12), sampling(3))
    bench.run()
    bench.assert_right(other)
    assert bench.scheduler.lifecycle.preemptions == 1
    bench.scheduler.lifecycle.resume(held)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_more_resumed_than_seats_take_turns() -> None:
    bench = Bench(total_blocks=64, max_running=2)
    lifecycle = bench.scheduler.lifecycle
    children = []
    for seed in range(4):
        child = bench.add(tokens_of(seed, 5), sampling(5))
        bench.step()
        lifecycle.hold(child)
        children.append(child)
    for child in children:
        lifecycle.resume(child)
    bench.run()
    bench.assert_right()


def test_ends_are_stop_and_length() -> None:
    bench = Bench(eos=3, total_blocks=128, max_running=16, max_step_tokens=200)
    children = [bench.add(tokens_of(seed, 6), sampling(40)) for seed in range(12)]
    bench.run()
    bench.assert_right()
    assert {bench.finish(child) for child in children} == {"stop", "length"}
    for child in children:
        last = bench.outputs[child][-1]
        assert last.stop_token == (3 if last.finish == "stop" else None)
        assert last.finish == "length" or last.token_ids == (3,)


def test_eos_can_be_ignored_or_put_off_and_stop_tokens_end_too() -> None:
    bench = Bench(eos=3, total_blocks=128)
    prompt = tokens_of(6, 6)
    ignoring = bench.add(prompt, sampling(60, ignore_eos=True))
    bench.run()
    assert bench.finish(ignoring) == "length"
    stop = bench.tokens(ignoring)[2]
    stopped = bench.add(prompt, sampling(60, stop_token_ids=(stop,)))
    patient = bench.add(prompt, sampling(60, stop_token_ids=(stop,), min_tokens=8))
    bench.run()
    assert bench.outputs[stopped][-1].stop_token == stop
    assert len(bench.tokens(stopped)) == 3
    assert stop not in bench.tokens(patient)[:8]
    bench.assert_right()


def test_histories_are_given_only_where_a_penalty_needs_them() -> None:
    bench = Bench(total_blocks=64)
    bench.add(tokens_of(1, 4))
    bench.add(tokens_of(2, 4), sampling(4, frequency_penalty=0.1))
    bench.step()
    plan = bench.step()
    assert plan is not None
    plain, penalised = (row.sample for row in plan.rows)
    assert plain is not None
    assert penalised is not None
    assert plain.prompt_ids == plain.output_ids == ()
    assert penalised.prompt_ids == tokens_of(2, 4)
    assert penalised.output_ids == tuple(bench.tokens(2)[:1])


@pytest.mark.parametrize(
    ("length", "wanted", "code"),
    [
        (90, 11, "context_length_exceeded"),
        (64, 1, "context_length_exceeded"),
        (0, 1, "invalid_value"),
        (5, 0, "invalid_value"),
    ],
)
def test_what_can_never_run_is_refused_at_once(length: int, wanted: int, code: str) -> None:
    bench = Bench(total_blocks=16, block_tokens=4, context_tokens=100)
    child = bench.add(tokens_of(1, length), sampling(wanted))
    assert bench.finish(child) == "error"
    error = bench.outputs[child][-1].error
    assert error is not None
    assert (error.status, error.code, error.reroute) == (400, code, False)
    bench.assert_empty()


def test_a_chain_of_other_blocks_is_refused() -> None:
    bench = Bench(block_tokens=4)
    child = bench.add(tokens_of(1, 8), chain=chain_of(tokens_of(1, 8), 2))
    assert bench.finish(child) == "error"
    bench.assert_empty()


def test_o4_the_queue_is_bounded_in_tokens() -> None:
    bench = Bench(max_waiting_tokens=30, context_tokens=500, total_blocks=64)
    first = bench.add(tokens_of(1, 100))
    bench.step()
    assert bench.finish(first) is None
    waiting = [bench.add(tokens_of(seed, 10)) for seed in (2, 3, 4)]
    refused = bench.add(tokens_of(5, 10))
    error = bench.outputs[refused][-1].error
    assert error is not None
    assert (error.status, error.reroute) == (429, True)
    assert error.retry_after_s is not None
    assert 1.0 <= error.retry_after_s <= 60.0
    bench.run()
    bench.assert_right(first, *waiting)
    bench.assert_empty()


def test_deadlines_end_children_wherever_they_are() -> None:
    bench = Bench(max_running=2, total_blocks=64)
    running = bench.add(tokens_of(1, 5), sampling(50), deadline_s=6.5)
    held = bench.add(tokens_of(2, 5), sampling(50), deadline_s=7.5)
    bench.step()
    bench.scheduler.lifecycle.hold(held)
    patient = bench.add(tokens_of(3, 5), sampling(9), deadline_s=1e9)
    waiting = bench.add(tokens_of(4, 5), sampling(50), deadline_s=3.5)
    bench.run()
    while bench.now_s < 9.0:
        bench.step()
    for child in (running, held, waiting):
        error = bench.outputs[child][-1].error
        assert error is not None
        assert (error.status, error.code) == (504, "deadline_exceeded")
    assert not bench.tokens(waiting)
    bench.assert_right(patient)
    bench.assert_empty()


def test_a_plan_is_committed_once_and_only_with_its_own_result() -> None:
    bench = Bench()
    bench.add(tokens_of(1, 5))
    plan = bench.plan()
    assert plan is not None
    with pytest.raises(InvariantError):
        bench.scheduler.plan(0.0)
    result = bench.runner.execute(plan)
    with pytest.raises(InvariantError):
        bench.scheduler.commit(replace(result, plan_id=PlanId(7)))
    with pytest.raises(InvariantError):
        bench.scheduler.commit(replace(result, rows=()))
    bench.scheduler.commit(result)
    with pytest.raises(InvariantError):
        bench.scheduler.commit(result)
    with pytest.raises(InvariantError):
        bench.scheduler.fail()


def test_load_counts_queued_tokens_after_what_the_cache_holds() -> None:
    bench = Bench(block_tokens=4, max_step_tokens=8)
    bench.add(tokens_of(1, 20), sampling(1))
    bench.run()
    assert bench.scheduler.queued_prefill_tokens() == 0
    bench.add(tokens_of(1, 20))
    bench.add(tokens_of(2, 20))
    assert bench.scheduler.queued_prefill_tokens() == 4 + 20
    bench.step()
    assert bench.scheduler.queued_prefill_tokens() == 16
    bench.run()
    assert bench.scheduler.queued_prefill_tokens() == 0


def test_a_policy_orders_and_its_order_is_kept_by_ranks() -> None:
    class ShortestFirst(StaticPolicy):
        def enter(self, task: Task) -> tuple[float, ...]:
            return (task.hit_tokens + task.uncached_tokens, task.child)

    bench = Bench(max_running=1, max_step_tokens=50, policy=ShortestFirst())
    long, short = bench.add(tokens_of(1, 9), sampling(1)), bench.add(tokens_of(2, 3), sampling(1))
    assert list(shape(bench.step())) == [short]
    assert list(shape(bench.step())) == [long]


def test_the_ledger_says_why_not_yet_and_why_never() -> None:
    bench = Bench(total_blocks=16, block_tokens=4, max_running=2, max_prefills=1, max_step_tokens=4)
    planner, ledger = bench.scheduler.planner, bench.scheduler.ledger
    bench.add(tokens_of(1, 12), sampling(20))
    bench.add(tokens_of(2, 6), sampling(2))
    bench.step()
    assert planner.later == {"prefills": 1}
    bench.add(tokens_of(3, 100), sampling(2))
    bench.add((), sampling(2))
    assert ledger.never == {"context_length_exceeded": 1, "invalid_value": 1}
    while bench.finish(2) is None:
        bench.step()
    for seed in (4, 5):
        bench.add(tokens_of(seed, 40), sampling(30))
    bench.step()
    assert planner.later["headroom"] + planner.later["blocks"] == 1
    bench.run()


def test_one_that_waits_for_a_turn_gets_it_when_a_prompt_is_done() -> None:
    bench = Bench(total_blocks=64, max_prefills=1, max_step_tokens=8)
    bench.add(tokens_of(1, 20), sampling(40))
    second = bench.add(tokens_of(2, 6), sampling(2))
    for _ in range(4):
        bench.step()
    assert bench.tokens(second)
    bench.run()
    bench.assert_right()
