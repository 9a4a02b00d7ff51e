"""Displacement: the urgent takes a place where that pays, nobody twice back and forth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.sched.plan import ChildId
from replica.sched.policies import POLICIES
from replica.sched.victims import MAX_PREEMPTIONS
from tests.replica.sched.rig import Bench, sampling, tokens_of

STEP_S = 1.0
"""What a step takes by the bench's clock; here the device says the same."""


def learnt(order: str = "deadline", **settings: object) -> Bench:
    """A bench that has learnt that every step takes a second."""
    fields = {"total_blocks": 64, "max_running": 2, "max_step_tokens": 64, **settings}
    bench = Bench(**fields, policy=POLICIES[order]())
    bench.runner.device_ms = lambda plan: 1e3 * STEP_S
    for seed in range(14):
        bench.add(tokens_of(900 + seed, 6), sampling(2), arrival_s=bench.now_s)
        bench.step()
    bench.run()
    bench.outputs.clear()
    bench.specs.clear()
    assert bench.scheduler.timing.sure_error is not None
    return bench


def busy(bench: Bench, count: int = 2, wanted: int = 60, **fields: object) -> list[ChildId]:
    """Long answers that decode, none of which is near its end."""
    params = sampling(wanted, ignore_eos=True)
    more = {"arrival_s": bench.now_s, **fields}
    children = [bench.add(tokens_of(seed, 6), params, **more) for seed in range(count)]
    for _ in range(4):
        bench.step()
    return children


def displaced(bench: Bench) -> dict[str, int]:
    return dict(bench.scheduler.planner.displaced)


def test_v17_a_request_of_higher_priority_takes_a_place_where_that_pays() -> None:
    bench = Bench(total_blocks=64, max_running=2)
    bench.runner.device_ms = lambda plan: 100.0
    low = [bench.add(tokens_of(seed, 6), sampling(60, ignore_eos=True)) for seed in (1, 2)]
    for _ in range(4):
        bench.step()
    high = bench.add(tokens_of(3, 6), sampling(4), priority=1)
    plan = bench.step()
    assert plan is not None
    assert plan.rows[0].child == high
    assert bench.scheduler.planner.displaced.total() == 1
    last = bench.scheduler.table.get(low[1])
    assert last is not None
    assert last.preemptions == 1
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_nobody_is_displaced_where_waiting_is_shorter_or_by_its_own_class() -> None:
    bench = Bench(total_blocks=64, max_running=2)
    bench.runner.device_ms = lambda plan: 1.0
    for seed in (1, 2):
        bench.add(tokens_of(seed, 30), sampling(6, ignore_eos=True))
    for _ in range(8):
        bench.step()
    bench.add(tokens_of(3, 6), sampling(4), priority=1)
    bench.add(tokens_of(4, 6), sampling(4))
    bench.run()
    assert bench.scheduler.planner.displaced.total() == 0
    bench.assert_right()


def test_a_request_is_displaced_only_so_often() -> None:
    bench = Bench(total_blocks=64, max_running=1)
    bench.runner.device_ms = lambda plan: 100.0
    low = bench.add(tokens_of(1, 6), sampling(60, ignore_eos=True))
    for seed in range(2, 9):
        bench.step()
        bench.step()
        bench.add(tokens_of(seed, 6), sampling(2), priority=1)
        for _ in range(4):
            bench.step()
    assert bench.scheduler.planner.displaced.total() == 3
    bench.run()
    bench.assert_right(low)


def test_nobody_is_displaced_in_vain() -> None:
    bench = Bench(total_blocks=64, block_tokens=4, max_prefills=1, max_step_tokens=8)
    bench.runner.device_ms = lambda plan: 100.0
    bench.add(tokens_of(1, 6), sampling(60, ignore_eos=True))
    bench.step()
    long = bench.add(tokens_of(2, 100), sampling(2), priority=1)
    bench.step()
    short = bench.add(tokens_of(3, 6), sampling(2), priority=1)
    while bench.finish(long) is None or bench.finish(short) is None:
        bench.step()
    assert bench.scheduler.planner.later["prefills"] > 0
    assert bench.scheduler.planner.displaced.total() == 0
    bench.add(tokens_of(4, 4 * 63), sampling(2), priority=2)
    bench.step()
    assert bench.scheduler.planner.displaced.total() == 1
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_who_would_be_late_takes_a_place_of_one_that_has_the_time() -> None:
    bench = learnt()
    busy(bench)
    due_s = bench.now_s + 10.0
    late = bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=due_s)
    while not bench.tokens(late):
        assert bench.step() is not None
    assert bench.now_s <= due_s
    assert displaced(bench) == {"deadline": 1}
    bench.run()
    bench.assert_right()
    bench.assert_empty()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"itl_ms": 250.0}, "a gap was promised"),
        ({"priority": 1}, "it has priority"),
        ({"end_s": 100.0}, "its own end is near"),
    ],
)
def test_who_has_not_the_time_is_not_displaced(fields: dict[str, float], why: str) -> None:
    bench = learnt()
    if "end_s" in fields:
        fields = {"deadline_s": bench.now_s + fields["end_s"]}
    children = busy(bench, **fields)
    bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 10.0)
    bench.run()
    assert displaced(bench) == {}, why
    bench.assert_right(*children)


@pytest.mark.parametrize("due", [True, False])
def test_who_waits_for_a_due_token_of_its_own_is_not_displaced(due: bool) -> None:
    bench = learnt(max_running=1, max_step_tokens=8)
    first_by_s = bench.now_s + 100.0 if due else None
    long = bench.add(
        tokens_of(1, 60), sampling(20, ignore_eos=True), arrival_s=1.0, first_by_s=first_by_s
    )
    bench.step()
    bench.add(tokens_of(2, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 6.0)
    for _ in range(4):
        bench.step()
    assert displaced(bench) == ({} if due else {"deadline": 1})
    bench.run()
    bench.assert_right(long)
    bench.assert_empty()


def test_nobody_is_displaced_for_what_comes_in_time_or_too_late_all_the_same() -> None:
    bench = learnt()
    children = busy(bench, wanted=20)
    bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 40.0)
    bench.add(tokens_of(8, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 0.5)
    bench.run()
    assert displaced(bench) == {}
    bench.assert_right(*children)


@pytest.mark.parametrize(("others", "expected"), [(3, {"deadline": 1}), (70, {})])
def test_nobody_is_displaced_at_the_cost_of_many_who_wait(
    others: int, expected: dict[str, int]
) -> None:
    bench = learnt()
    busy(bench)
    bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 10.0)
    for seed in range(others):
        bench.add(tokens_of(100 + seed, 6), sampling(1), arrival_s=bench.now_s)
    for _ in range(4):
        bench.step()
    assert displaced(bench) == expected


def test_nobody_is_displaced_for_less_delay_than_it_costs() -> None:
    bench = learnt()
    children = busy(bench, wanted=12)
    # Some 8 s until a place is free, and one for its prefill: half a second late.
    bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=bench.now_s + 9.6)
    bench.run()
    assert displaced(bench) == {}
    bench.assert_right(*children)


@pytest.mark.parametrize(("order", "expected"), [("fcfs", set()), ("priority", {"priority"})])
def test_only_an_order_that_looks_at_it_displaces_by_it(order: str, expected: set[str]) -> None:
    bench = learnt(order)
    busy(bench)
    first_by_s = bench.now_s + 10.0
    bench.add(tokens_of(7, 6), sampling(4), arrival_s=bench.now_s, first_by_s=first_by_s)
    bench.step()
    bench.add(tokens_of(8, 6), sampling(4), arrival_s=bench.now_s, priority=1)
    bench.run()
    assert set(displaced(bench)) == expected
    bench.assert_right()


@settings(max_examples=8)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(6, 30),
            st.integers(8, 24),
            st.sampled_from([0, 0, 0, 1]),
            st.sampled_from([None, 9.0, 12.0, 25.0]),
            st.sampled_from([None, None, 250.0]),
            st.integers(0, 4),
        ),
        min_size=8,
        max_size=12,
    ),
    overlapped=st.booleans(),
)
def test_displacement_never_goes_back_and_forth(
    arrivals: list[tuple[int, int, int, float | None, float | None, int]], overlapped: bool
) -> None:
    bench = learnt(max_step_tokens=8)
    took: dict[ChildId, set[ChildId]] = {}
    for length, wanted, priority, due_s, itl_ms, steps in arrivals:
        bench.add(
            tokens_of(length, length),
            sampling(wanted, ignore_eos=True),
            priority=priority,
            itl_ms=itl_ms,
            arrival_s=bench.now_s,
            first_by_s=None if due_s is None else bench.now_s + due_s,
        )
        for _ in range(steps):
            watched_step(bench, took)
    while bench.scheduler.runnable and not overlapped:
        watched_step(bench, took)
    bench.run_overlapped()
    for child, victims in took.items():
        assert not any(child in took.get(victim, ()) for victim in victims), "it went back"
    for child, outputs in bench.outputs.items():
        if bench.finish(child) == "error":
            assert outputs[-1].error is not None
            assert outputs[-1].error.code == "deadline"
        else:
            bench.assert_right(child)
    bench.assert_empty()


def watched_step(bench: Bench, took: dict[ChildId, set[ChildId]]) -> None:
    """One step; notes who was started by it in whose place."""
    table = bench.scheduler.table
    counts = {request.child: request.preemptions for request in table}
    waiting = {request.child for request in table.waiting}
    before = bench.scheduler.planner.displaced.total()
    bench.step()
    gone = {
        request.child for request in table if request.preemptions > counts.get(request.child, 0)
    }
    assert all(request.preemptions <= MAX_PREEMPTIONS for request in table)
    assert bench.scheduler.planner.displaced.total() - before == len(gone)
    running = {request.child for request in table.running}
    for child in waiting & running if gone else ():
        took.setdefault(child, set()).update(gone)
