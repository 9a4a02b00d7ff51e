"""Prompts that are computed for their blocks alone: the end comes once these are written out."""

from __future__ import annotations

import pytest

from events.errors import InvariantError
from replica.sched.plan import ChildId
from replica.sched.request import State
from tests.fakes.tiers import FakeTiers
from tests.replica.sched.rig import Bench, sampling, tokens_of

PROMPT = tokens_of(1, 20)
"""Five full blocks."""


def computed(**settings: object) -> tuple[Bench, FakeTiers, ChildId]:
    """A bench where a prompt was computed, and its blocks are on their way out."""
    bench = Bench(**{"total_blocks": 10, "max_step_tokens": 8, **settings}, tiered=True)
    assert bench.tiers is not None
    child = bench.add(PROMPT, sampling(1), write_to="host")
    while bench.step() is not None:
        pass
    return bench, bench.tiers, child


def state(bench: Bench, child: ChildId) -> State | None:
    request = bench.scheduler.table.get(child)
    return None if request is None else request.state


def test_the_end_comes_with_the_blocks_and_without_a_token() -> None:
    bench, tiers, child = computed()
    assert state(bench, child) is State.WRITING
    assert bench.outputs[child] == []
    store, blocks = tiers.writing[child]
    assert store == "host"
    assert [block.key for block in blocks] == list(bench.specs[child].chain)
    assert tiers.wrote(child) == 5
    bench.collect()
    (output,) = bench.outputs[child]
    assert (output.finish, output.token_ids, output.written_blocks) == ("length", (), 5)
    bench.assert_empty()


def test_what_was_cached_is_written_too() -> None:
    bench, tiers, first = computed()
    tiers.wrote(first)
    child = bench.add(PROMPT, sampling(1), write_to="host")
    while bench.step() is not None:
        pass
    assert len(tiers.writing[child][1]) == 5
    tiers.wrote(child, 2)
    bench.collect()
    assert bench.outputs[child][-1].written_blocks == 2


def test_K1_an_abort_keeps_the_blocks_until_nobody_reads_them() -> None:
    bench, tiers, child = computed(total_blocks=6)
    bench.scheduler.lifecycle.hold(child)
    bench.scheduler.lifecycle.resume(child)
    bench.scheduler.lifecycle.abort(child)
    bench.collect()
    assert bench.finish(child) == "abort"
    assert state(bench, child) is State.ABORTING
    assert bench.scheduler.cache.available == 1
    tiers.wrote(child)
    bench.collect()
    assert len(bench.outputs[child]) == 1
    bench.assert_empty()


def test_a_deadline_ends_it_while_it_is_written() -> None:
    bench = Bench(total_blocks=10, max_step_tokens=32, tiered=True)
    assert bench.tiers is not None
    child = bench.add(PROMPT, sampling(1), write_to="host", deadline_s=4.5)
    bench.step()
    assert state(bench, child) is State.WRITING
    for _ in range(3):
        bench.plan()
    assert bench.finish(child) == "error"
    bench.tiers.wrote(child)
    bench.assert_empty()


def test_others_run_meanwhile_and_what_is_written_is_not_taken_from_it() -> None:
    bench, tiers, child = computed(total_blocks=8)
    other = bench.add(tokens_of(2, 6), sampling(5))
    while bench.step() is not None:
        pass
    assert bench.finish(other) == "length"
    assert state(bench, child) is State.WRITING
    tiers.wrote(child)
    bench.collect()
    bench.assert_empty()


def test_one_that_lost_its_place_with_its_last_row_in_flight_is_written_all_the_same() -> None:
    bench = Bench(total_blocks=10, max_step_tokens=32, tiered=True)
    assert bench.tiers is not None
    child = bench.add(PROMPT, sampling(1), write_to="host")
    plan = bench.plan()
    request = bench.scheduler.table.get(child)
    assert plan is not None
    assert request is not None
    bench.scheduler.lifecycle.preempt(request)
    bench.finish_step(plan)
    assert state(bench, child) is State.WRITING
    bench.tiers.wrote(child)
    bench.collect()
    assert bench.finish(child) == "length"
    bench.assert_empty()


def test_without_tiers_it_ends_at_once_with_nothing_written() -> None:
    bench = Bench(total_blocks=10)
    child = bench.add(PROMPT, sampling(1), write_to="host")
    bench.run()
    (output,) = bench.outputs[child]
    assert (output.finish, output.written_blocks) == ("length", 0)
    bench.assert_empty()


def test_a_second_end_of_a_write_is_a_broken_promise() -> None:
    bench, tiers, child = computed()
    tiers.wrote(child)
    with pytest.raises(InvariantError):
        bench.scheduler.written(child, 5)
