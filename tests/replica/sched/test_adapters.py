"""Requests that need an adapter: who waits, who goes first, and what may leave memory."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from events.errors import ADAPTER_NOT_FINITE
from replica.sched.adapters import AVOIDED_S, MAX_AVOIDED_S, PATIENCE_S, Adapters
from replica.sched.invariants import check_scheduler
from replica.sched.plan import NOT_FINITE, ExecutionPlan
from replica.sched.planner import SCAN_REQUESTS
from tests.fakes.adapter_loader import FakeAdapters
from tests.replica.sched.rig import Bench, sampling, tokens_of

NAMES = ("a", "b", "c", "d")


def bench_of(in_memory: int = 2, in_use: int = 2, **changes: object) -> Bench:
    return Bench(
        adapters=FakeAdapters(*NAMES),
        max_adapters=in_memory,
        max_adapters_per_batch=in_use,
        **changes,
    )


def loader(bench: Bench) -> FakeAdapters:
    assert bench.adapters is not None
    return bench.adapters


def planned(plan: ExecutionPlan | None) -> dict[int, str]:
    return {} if plan is None else {row.child: row.adapter for row in plan.rows}


def test_a_request_waits_for_its_adapter_and_holds_up_nobody() -> None:
    bench = bench_of()
    first, behind = bench.add(tokens_of(1, 6), adapter="a"), bench.add(tokens_of(2, 6))
    assert planned(bench.step()) == {behind: ""}
    assert loader(bench).open == ["a"]
    assert bench.scheduler.planner.later["adapter"] == 1
    loader(bench).finish("a")
    assert planned(bench.step()) == {first: "a", behind: ""}
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_C3_the_same_prompt_finds_nothing_of_another_adapter() -> None:
    bench, prompt = bench_of(), tokens_of(1, 13)
    for adapter in ("", "a", "b"):
        child = bench.add(prompt, adapter=adapter)
        bench.run()
        assert bench.cached(child) == 0
        again = bench.add(prompt, adapter=adapter)
        bench.run()
        assert bench.cached(again) == 12
    bench.assert_right()
    assert len({tuple(bench.tokens(child)) for child in bench.specs}) == 3


def test_one_that_is_held_before_its_first_row_gives_its_place_back() -> None:
    """It has a seat and its adapter, but nothing to keep; it is started anew."""
    bench = bench_of(in_memory=1, in_use=1, max_step_tokens=1, max_running=3)
    bench.add(tokens_of(1, 6))
    bench.step()
    child = bench.add(tokens_of(2, 9), adapter="a")
    bench.step()
    loader(bench).finish("a")
    bench.step()
    request = bench.scheduler.table.get(child)
    assert request is not None
    assert (request.holds_adapter, request.blocks) == (True, [])
    bench.scheduler.lifecycle.hold(child)
    assert bench.scheduler.adapters.references == {"a": 0}
    other = bench.add(tokens_of(3, 5), adapter="b")
    bench.step()
    loader(bench).finish("b")
    bench.step()
    assert bench.scheduler.adapters.references == {"b": 1}
    bench.scheduler.lifecycle.resume(child)
    bench.run()
    bench.assert_right(child, other)
    bench.assert_empty()


def test_a_failed_load_is_told_to_those_who_wait_and_the_next_one_tries_again() -> None:
    bench = bench_of()
    waiting = [bench.add(tokens_of(seed, 5), adapter="a") for seed in (1, 2)]
    other = bench.add(tokens_of(3, 5), adapter="b")
    bench.step()
    loader(bench).finish("a", loaded=False)
    bench.collect()
    for child in waiting:
        error = bench.outputs[child][-1].error
        assert error is not None
        assert (error.status, error.code, error.reroute) == (503, "adapter_load_failed", True)
        assert "'a'" in error.message
    again = bench.add(tokens_of(1, 5), adapter="a")
    bench.run()
    bench.assert_right(other, again)
    state = bench.scheduler.adapters.state()
    assert (state.loads, state.failures) == (3, 1)
    bench.assert_empty()


def test_after_each_failed_load_others_are_asked_to_stay_away_for_longer() -> None:
    now_s, fake = 100.0, FakeAdapters(*NAMES)
    adapters = Adapters(Bench().scheduler.ledger, fake, lambda: now_s)
    fake.attach(adapters.landed)
    waits = []
    for _ in range(6):
        adapters.ready("a", ())
        fake.finish("a", loaded=False)
        waits.append(adapters.state().avoided_until_s["a"] - now_s)
        now_s += 100.0
    assert waits == [AVOIDED_S, 2 * AVOIDED_S, 4 * AVOIDED_S, 8 * AVOIDED_S, *2 * [MAX_AVOIDED_S]]
    adapters.ready("a", ())
    fake.finish("a")
    assert adapters.state().avoided_until_s == {}


def test_numbers_that_are_not_finite_are_the_adapters_fault() -> None:
    bench = bench_of()
    children = [bench.add(tokens_of(1, 5), adapter=adapter) for adapter in ("a", "")]
    loader(bench).finish_all()
    bench.runner.faults.row_errors.update(dict.fromkeys(children, NOT_FINITE))
    bench.run()
    errors = [bench.outputs[child][-1].error for child in children]
    assert [error and error.code for error in errors] == [ADAPTER_NOT_FINITE, "engine_error"]


def test_an_unknown_adapter_is_refused_at_once() -> None:
    bench = bench_of()
    for adapters in (bench, Bench()):
        child = adapters.add(tokens_of(1, 5), adapter="nobody")
        error = adapters.outputs[child][-1].error
        assert error is not None
        assert (error.status, error.code) == (404, "model_not_found")


def test_no_more_different_ones_are_in_use_than_may_be() -> None:
    bench = bench_of(in_memory=4, in_use=2)
    for seed in range(8):
        bench.add(tokens_of(seed, 5), sampling(6), adapter=NAMES[seed % 4])
    most, plan = 0, bench.plan()
    while plan is not None or bench.scheduler.runnable:
        if plan is not None:
            most = max(most, len(set(planned(plan).values())))
            bench.finish_step(plan)
        loader(bench).finish_all()
        plan = bench.plan()
    assert most == 2
    bench.assert_right()
    # All four found room in memory, so that none was loaded twice.
    assert bench.scheduler.adapters.state().loads == 4


@pytest.mark.parametrize("in_memory", [2, 3])
def test_who_is_held_gives_up_the_place_that_another_adapter_waits_for(in_memory: int) -> None:
    bench = bench_of(in_memory=in_memory, in_use=2)
    held = [
        bench.add(tokens_of(seed, 5), sampling(9), adapter=name)
        for seed, name in ((1, "a"), (2, "b"))
    ]
    bench.step()
    loader(bench).finish_all()
    bench.step()
    for child in held:
        bench.scheduler.lifecycle.hold(child)
    other = bench.add(tokens_of(3, 5), adapter="c")
    for _ in range(20):
        bench.step()
        loader(bench).finish_all()
    bench.assert_right(other)
    assert [each.holds_adapter for each in bench.scheduler.table] == [False, True]
    for child in held:
        bench.scheduler.lifecycle.resume(child)
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_who_nobody_uses_leaves_first_and_who_is_used_stays() -> None:
    bench = bench_of(in_memory=2, in_use=2)
    for name in ("a", "b", "a"):
        bench.add(tokens_of(1, 5), adapter=name)
        bench.run()
    bench.add(tokens_of(1, 5), adapter="c")
    bench.run()
    assert loader(bench).dropped == ["b"]
    long = bench.add(tokens_of(2, 5), sampling(40), adapter="a")
    bench.step()
    bench.add(tokens_of(3, 5), adapter="d")
    bench.step()
    assert loader(bench).dropped == ["b", "c"]
    bench.run()
    bench.assert_right(long)


def test_what_is_waited_for_does_not_leave_for_those_behind() -> None:
    bench = bench_of(in_memory=1, in_use=1)
    using = bench.add(tokens_of(1, 5), sampling(8), adapter="a")
    bench.run(limit=50)
    # Their blocks are not free: the adapter is in memory, its request is not admitted.
    holder = bench.add(tokens_of(2, 100), sampling(24))
    bench.step()
    first = bench.add(tokens_of(3, 100), adapter="a")
    second = bench.add(tokens_of(4, 5), adapter="b")
    for _ in range(5):
        bench.step()
    assert loader(bench).dropped == []
    bench.run()
    bench.assert_right(using, holder, first, second)
    assert bench.scheduler.adapters.state().loads == 2


def test_a_steady_stream_to_those_in_use_keeps_nobody_out_for_ever() -> None:
    bench = bench_of(in_memory=1, in_use=1, total_blocks=64)
    bench.add(tokens_of(0, 5), sampling(6), adapter="a")
    bench.step()
    loader(bench).finish("a")
    bench.step()
    rare = bench.add(tokens_of(99, 5), adapter="b")
    for seed in range(1, 40):
        bench.add(tokens_of(seed, 5), sampling(6), adapter="a")
        bench.step()
        loader(bench).finish_all()
        if bench.finish(rare):
            break
    assert bench.finish(rare) == "length"
    assert seed < 10 * PATIENCE_S + 10
    bench.run()
    bench.assert_right()


def test_many_who_wait_for_an_adapter_do_not_hide_those_behind_them() -> None:
    bench = bench_of()
    for seed in range(2 * SCAN_REQUESTS):
        bench.add(tokens_of(seed, 3), sampling(1), adapter="a")
    plain = bench.add(tokens_of(1, 5))
    assert planned(bench.step()) == {plain: ""}


def test_a_preempted_request_gives_its_adapter_up_and_a_held_one_keeps_it() -> None:
    bench = bench_of()
    child = bench.add(tokens_of(1, 6), sampling(9), adapter="a")
    bench.step()
    loader(bench).finish("a")
    bench.step()
    lifecycle, adapters = bench.scheduler.lifecycle, bench.scheduler.adapters
    lifecycle.hold(child)
    assert adapters.references == {"a": 1}
    lifecycle.resume(child)
    request = bench.scheduler.table.get(child)
    assert request is not None
    lifecycle.preempt(request)
    assert adapters.references == {"a": 0}
    bench.run()
    bench.assert_right()


class AdapterMachine(RuleBasedStateMachine):
    """Random words to a scheduler with adapters, in the middle of steps too."""

    @initialize(
        in_memory=st.integers(1, 3), in_use=st.integers(1, 3), blocks=st.sampled_from((9, 24))
    )
    def begin(self, in_memory: int, in_use: int, blocks: int) -> None:
        in_use = min(in_use, in_memory)
        self.bench = bench_of(in_memory, in_use, total_blocks=blocks, horizon_tokens=1)
        self.flying: deque[ExecutionPlan] = deque()
        self.ended: set[int] = set()

    @rule(adapter=st.sampled_from(("", *NAMES)), seed=st.integers(0, 3), wanted=st.integers(1, 9))
    def add(self, adapter: str, seed: int, wanted: int) -> None:
        self.bench.add(tokens_of(seed, 5 + seed), sampling(wanted), adapter=adapter)

    @rule(ahead=st.booleans())
    def plan(self, ahead: bool) -> None:
        if not self.flying:
            plan = self.bench.plan()
        elif ahead and len(self.flying) == 1:
            plan = self.bench.scheduler.plan_ahead(self.bench.now_s)
            self.bench.collect()
        else:
            return
        if plan is not None:
            self.flying.append(plan)

    @rule()
    def commit(self) -> None:
        if self.flying:
            self.bench.finish_step(self.flying.popleft())

    @rule(loaded=st.booleans())
    def land(self, loaded: bool) -> None:
        if loader(self.bench).open:
            name = loader(self.bench).open[0]
            waiting = [each.child for each in self.bench.scheduler.table.waiting]
            loader(self.bench).finish(name, loaded)
            self.bench.collect()
            self.ended |= {child for child in waiting if self.bench.finish(child) == "error"}

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        children = [each.child for each in self.bench.scheduler.table]
        if not children:
            return
        child = data.draw(st.sampled_from(children))
        word = data.draw(st.sampled_from(("abort", "hold", "resume", "preempt")))
        lifecycle, request = self.bench.scheduler.lifecycle, self.bench.scheduler.table.get(child)
        assert request is not None
        if word == "preempt":
            if request.state.name == "RUNNING":
                lifecycle.preempt(request)
        else:
            getattr(lifecycle, word)(child)
            self.bench.collect()
            if word == "abort":
                self.ended.add(child)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "bench"):
            check_scheduler(self.bench.scheduler)

    def teardown(self) -> None:
        while self.flying:
            self.commit()
        for child in self.bench.specs:
            self.bench.scheduler.lifecycle.resume(child)
        self.bench.run()
        self.bench.assert_right(*(self.bench.specs.keys() - self.ended))
        self.bench.assert_empty()


def test_no_order_of_events_breaks_a_promise() -> None:
    run_state_machine_as_test(
        AdapterMachine, settings=settings(max_examples=30, stateful_step_count=40)
    )
