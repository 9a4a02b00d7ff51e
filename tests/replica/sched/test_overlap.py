"""The next plan is made while one executes: same tokens, whatever fails or leaves meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from events.errors import InvariantError
from replica.sched.plan import PENDING, ChildId, ExecutionPlan
from tests.fakes.grammar import FakeGrammar
from tests.fakes.runner import NON_FINITE
from tests.replica.sched.rig import Bench, add_mixed, sampling, tight_bench, tokens_of


def ahead(bench: Bench) -> tuple[ExecutionPlan, ExecutionPlan]:
    """A plan in flight and the one behind it."""
    plan = bench.plan()
    following = bench.scheduler.plan_ahead(bench.now_s)
    assert plan is not None
    assert following is not None
    return plan, following


@pytest.mark.parametrize("total_blocks", [10, 17, 64])
@pytest.mark.parametrize("step_tokens", [3, 8, 40])
@pytest.mark.parametrize("horizon_tokens", [1, 64])
def test_the_same_tokens_as_without(
    total_blocks: int, step_tokens: int, horizon_tokens: int
) -> None:
    bench = tight_bench(total_blocks, step_tokens, horizon_tokens)
    for index in range(14):
        add_mixed(bench, index)
    assert bench.run_overlapped() > 10
    bench.assert_right()
    bench.assert_empty()


def test_a_row_planned_ahead_has_a_placeholder_and_its_own_position() -> None:
    bench = Bench()
    child = bench.add(tokens_of(1, 6), sampling(5))
    plan, following = ahead(bench)
    (row,) = following.rows
    assert (row.child, row.start, row.token_ids) == (child, 6, (PENDING,))
    assert row.sample is not None
    assert row.sample.position == 7
    with pytest.raises(InvariantError):
        bench.scheduler.plan_ahead(bench.now_s)
    bench.finish_step(plan)
    assert len(bench.tokens(child)) == 1
    bench.finish_step(following)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_results_are_committed_in_the_order_of_their_plans() -> None:
    bench = Bench()
    bench.add(tokens_of(1, 6), sampling(5))
    first, second = ahead(bench)
    results = [bench.runner.execute(plan) for plan in (first, second)]
    with pytest.raises(InvariantError):
        bench.scheduler.commit(results[1])
    for result in results:
        bench.scheduler.commit(result)
        bench.collect()
    bench.run()
    bench.assert_right()


def test_a_result_with_the_rows_of_others_is_no_result() -> None:
    bench = Bench()
    bench.add(tokens_of(1, 6), sampling(5))
    plan = bench.plan()
    assert plan is not None
    result = bench.runner.execute(plan)
    strangers = tuple(replace(row, child=ChildId(99)) for row in result.rows)
    for rows in (strangers, (), result.rows * 2):
        with pytest.raises(InvariantError, match="rows"):
            bench.scheduler.commit(replace(result, rows=rows))


def test_what_a_penalty_a_grammar_or_the_last_token_needs_is_not_planned_ahead() -> None:
    bench = Bench(total_blocks=64)
    plain = bench.add(tokens_of(1, 4), sampling(9))
    bench.add(tokens_of(2, 4), sampling(9, presence_penalty=0.5))
    bench.add(tokens_of(3, 4), sampling(1))
    bench.add(tokens_of(4, 4), sampling(9), grammar=FakeGrammar(begins_at=4, whole=5))
    _, following = ahead(bench)
    assert [row.child for row in following.rows] == [plain]


def test_min_tokens_counts_the_tokens_in_flight() -> None:
    bench = Bench(eos=3, total_blocks=64)
    for seed in range(8):
        bench.add(tokens_of(seed, 5), sampling(12, min_tokens=4))
    bench.run_overlapped()
    bench.assert_right()


def test_a_token_that_ends_a_child_makes_its_next_row_void() -> None:
    bench = Bench(eos=3, total_blocks=128, max_running=16, max_step_tokens=200)
    children = [bench.add(tokens_of(seed, 6), sampling(40)) for seed in range(12)]
    bench.run_overlapped()
    assert "stop" in {bench.finish(child) for child in children}
    bench.assert_right()
    bench.assert_empty()


@pytest.mark.parametrize("word", ["abort", "hold", "preempt"])
@pytest.mark.parametrize("when", ["before_first", "between", "before_ahead"])
def test_leaving_with_two_rows_in_flight(word: str, when: str) -> None:
    bench = Bench(total_blocks=64)
    child, other = (bench.add(tokens_of(seed, 6), sampling(9)) for seed in (1, 2))
    lifecycle = bench.scheduler.lifecycle

    def leave() -> None:
        request = bench.scheduler.table.get(child)
        assert request is not None
        lifecycle.preempt(request) if word == "preempt" else getattr(lifecycle, word)(child)
        bench.collect()

    plan = bench.plan()
    assert plan is not None
    if when == "before_ahead":
        leave()
    following = bench.scheduler.plan_ahead(bench.now_s)
    assert following is not None
    assert (child in {row.child for row in following.rows}) == (when != "before_ahead")
    if when == "before_first":
        leave()
    bench.finish_step(plan)
    if when == "between":
        leave()
    bench.finish_step(following)
    lifecycle.resume(child)
    bench.run_overlapped()
    bench.assert_right(*([other] if word == "abort" else [child, other]))
    bench.assert_empty()


def test_what_an_aborted_child_had_in_flight_is_published_in_whole_blocks() -> None:
    bench = Bench()
    child = bench.add(tokens_of(1, 7), sampling(9))
    plan, following = ahead(bench)
    bench.scheduler.lifecycle.abort(child)
    bench.finish_step(plan)
    bench.finish_step(following)
    bench.assert_empty()
    assert bench.tokens(child) == []
    again = bench.add((*tokens_of(1, 7), bench.wanted(child)[0], 5), sampling(2))
    bench.run()
    assert bench.cached(again) == 8
    bench.assert_right(again)


@pytest.mark.parametrize("kind", ["first_prefill", "middle_chunk", "last_chunk", "decode", "mixed"])
def test_a_failed_step_calls_off_the_one_planned_behind_it(kind: str) -> None:
    bench = Bench(total_blocks=128)
    steps = {"first_prefill": 0, "middle_chunk": 1, "last_chunk": 2, "decode": 4, "mixed": 0}
    children = [bench.add(tokens_of(1, 40), sampling(5))]
    for _ in range(steps[kind]):
        bench.step()
    if kind == "mixed":
        bench.run_overlapped(limit=2_000)
        children += [bench.add(tokens_of(seed, 20), sampling(6)) for seed in (2, 3, 4)]
    bench.runner.faults.raise_on |= {bench.scheduler.last_plan + 1, bench.scheduler.last_plan + 4}
    bench.run_overlapped()
    bench.assert_right(*children)
    bench.assert_empty()


def test_a_row_behind_one_that_failed_alone_is_void_and_publishes_nothing() -> None:
    bench = Bench(total_blocks=64, block_tokens=4, max_step_tokens=8)
    child = bench.add(tokens_of(1, 30), sampling(4))
    first, second = ahead(bench)
    bench.runner.faults.row_errors[child] = NON_FINITE
    result = bench.runner.execute(first)
    bench.runner.faults.row_errors.clear()
    bench.scheduler.commit(result)
    bench.collect()
    assert bench.finish(child) == "error"
    bench.finish_step(second)
    assert bench.scheduler.cache.nodes() == {}
    bench.assert_empty()


def test_a_decode_whose_token_never_came_is_void() -> None:
    bench = Bench(total_blocks=64)
    child, other = (bench.add(tokens_of(seed, 6), sampling(5)) for seed in (1, 2))
    first, second = ahead(bench)
    bench.runner.faults.row_errors[child] = NON_FINITE
    bench.finish_step(first)
    bench.runner.faults.row_errors.clear()
    bench.finish_step(second)
    assert bench.finish(child) == "error"
    bench.run_overlapped()
    bench.assert_right(other)
    bench.assert_empty()
