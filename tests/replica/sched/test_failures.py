"""A plan that fails counts as nothing computed; the culprit is refused, the others get through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replica.sched.commit import MAX_FAILURES
from replica.sched.plan import RowResult
from tests.fakes.runner import NON_FINITE
from tests.replica.sched.rig import Bench, sampling, tokens_of


def mixed(bench: Bench) -> list[int]:
    """A decode, a middle chunk and a waiting one."""
    children = [bench.add(tokens_of(1, 6), sampling(8))]
    bench.step()
    children += [bench.add(tokens_of(seed, 30), sampling(5)) for seed in (2, 3)]
    bench.step()
    return children


@pytest.mark.parametrize("kind", ["first_prefill", "middle_chunk", "last_chunk", "decode", "mixed"])
def test_one_failed_step_of_every_kind_costs_no_token(kind: str) -> None:
    bench = Bench(total_blocks=64)
    steps = {"first_prefill": 0, "middle_chunk": 1, "last_chunk": 2, "decode": 4, "mixed": 1}
    children = mixed(bench) if kind == "mixed" else [bench.add(tokens_of(1, 40), sampling(5))]
    for _ in range(steps[kind]):
        bench.step()
    bench.runner.faults.raise_on.add(bench.scheduler.last_plan + 1)
    bench.run()
    bench.assert_right(*children)
    bench.assert_empty()


def test_nothing_of_a_failed_plan_is_published() -> None:
    bench = Bench(block_tokens=4)
    bench.add(tokens_of(1, 12))
    bench.scheduler.journal.drain()
    bench.runner.faults.raise_on.add(1)
    bench.step()
    assert bench.scheduler.journal.drain() == []
    assert bench.scheduler.cache.nodes() == {}
    bench.run()
    bench.assert_right()


def test_the_culprit_is_found_and_refused_and_the_others_get_through() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=64)
    children = [bench.add(tokens_of(seed, 6), sampling(6)) for seed in range(5)]
    bench.step()
    bench.runner.faults.poison.add(children[2])
    bench.run()
    last = bench.outputs[children[2]][-1]
    assert last.finish == "error"
    assert last.error is not None
    assert (last.error.status, last.error.code) == (500, "engine_error")
    bench.assert_right(*(child for child in children if child != children[2]))
    bench.assert_empty()


def test_retries_are_bounded_when_everything_fails() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=64)
    children = [bench.add(tokens_of(seed, 6)) for seed in range(4)]
    bench.runner.faults.always = True
    assert bench.run() <= len(children) * MAX_FAILURES
    for child in children:
        assert bench.finish(child) == "error"
    bench.assert_empty()
    bench.runner.faults.always = False
    after = bench.add(tokens_of(9, 6))
    bench.run()
    bench.assert_right(after)


def test_who_fails_alone_is_refused_the_second_time() -> None:
    bench = Bench()
    child = bench.add(tokens_of(1, 6))
    bench.runner.faults.poison.add(child)
    bench.step()
    assert not any(output.finish for output in bench.outputs[child])
    bench.step()
    assert bench.finish(child) == "error"
    bench.assert_empty()


def test_a_row_with_numbers_that_are_not_finite_is_refused_alone() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=64)
    children = [bench.add(tokens_of(seed, 6), sampling(6)) for seed in range(3)]
    bench.step()
    bench.runner.faults.row_errors[children[1]] = NON_FINITE
    plan = bench.step()
    assert plan is not None
    assert bench.finish(children[1]) == "error"
    bench.run()
    bench.assert_right(children[0], children[2])
    bench.assert_empty()


def test_a_sampled_row_without_a_token_is_an_error_of_its_own() -> None:
    bench = Bench()
    child = bench.add(tokens_of(1, 6))
    plan = bench.plan()
    assert plan is not None
    result = bench.runner.execute(plan)
    bench.scheduler.commit(replace(result, rows=(RowResult(child=child, token_id=None),)))
    bench.collect()
    assert bench.finish(child) == "error"
    bench.assert_empty()


def test_innocent_neighbours_of_many_culprits_get_through() -> None:
    bench = Bench(total_blocks=128, max_step_tokens=64)
    innocent = bench.add(tokens_of(1, 6), sampling(60))
    for seed in range(2, 14):
        bench.step()
        bench.runner.faults.poison.add(bench.add(tokens_of(seed, 6)))
    bench.run()
    bench.assert_right(innocent)
    bench.assert_empty()


def test_a_suspect_that_is_preempted_or_held_stops_nobody() -> None:
    bench = Bench(total_blocks=64, max_step_tokens=64)
    children = [bench.add(tokens_of(seed, 6), sampling(6)) for seed in range(4)]
    bench.step()
    bench.runner.faults.raise_on.add(2)
    bench.step()
    bench.scheduler.lifecycle.hold(children[0])
    request = bench.scheduler.table.get(children[1])
    assert request is not None
    bench.scheduler.lifecycle.preempt(request)
    bench.run()
    bench.assert_right(*children[1:])
    bench.scheduler.lifecycle.resume(children[0])
    bench.run()
    bench.assert_right()
    bench.assert_empty()
