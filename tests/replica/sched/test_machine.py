"""Anything in any order: the scheduler under random words, with every promise checked on the way.

Requests come, are aborted, held, resumed, preempted; plans are made, also ahead, committed late,
failed; loads from below come or don't; the cache is cleared, bounded and evicted from. At the end
everybody who was not aborted or refused has exactly the tokens of a plain run.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replica.sched.invariants import check_scheduler
from replica.sched.plan import ExecutionPlan, ExecutionResult
from tests.fakes.runner import NON_FINITE, FakeRunnerError
from tests.replica.sched.rig import Bench, sampling, tokens_of

PICK = st.integers(0, 1 << 30)


class SchedulerMachine(RuleBasedStateMachine):
    """`flying`: plans in flight, oldest first; `result` is of the oldest, executed but not known
    to the scheduler."""

    @initialize(
        total_blocks=st.sampled_from([9, 16, 40]),
        step_tokens=st.sampled_from([3, 8, 30]),
        horizon_tokens=st.sampled_from([1, 8, 64]),
        max_running=st.integers(1, 6),
        target_ms=st.sampled_from([0.0, 3.0]),
    )
    def begin(
        self,
        total_blocks: int,
        step_tokens: int,
        horizon_tokens: int,
        max_running: int,
        target_ms: float,
    ) -> None:
        self.bench = Bench(
            total_blocks,
            4,
            max_step_tokens=step_tokens,
            max_running=max_running,
            horizon_tokens=horizon_tokens,
            itl_target_ms=target_ms,
            max_prefills=3,
            eos=3,
            tiered=True,
        )
        self.flying: deque[ExecutionPlan] = deque()
        self.result: ExecutionResult | None = None
        self.aborted: set[int] = set()

    @rule(
        head=st.integers(0, 3),
        length=st.integers(1, 30),
        wanted=st.integers(1, 20),
        priority=st.integers(0, 1),
        kind=st.sampled_from(["plain", "penalty", "patient", "ignore_eos"]),
    )
    def add(self, head: int, length: int, wanted: int, priority: int, kind: str) -> None:
        if len(self.bench.scheduler.table) > 12:
            return
        fields: dict[str, object] = {
            "plain": {},
            "penalty": {"presence_penalty": 0.5},
            "patient": {"min_tokens": wanted // 2},
            "ignore_eos": {"ignore_eos": True},
        }[kind]
        prompt = (*tokens_of(head, length // 2), *tokens_of(100 + length, length - length // 2))
        self.bench.add(prompt, sampling(wanted, **fields), priority=priority)

    def pick(self, number: int) -> int | None:
        children = [request.child for request in self.bench.scheduler.table]
        return children[number % len(children)] if children else None

    @rule(number=PICK, word=st.sampled_from(["abort", "hold", "hold", "resume", "resume"]))
    def say(self, number: int, word: str) -> None:
        child = self.pick(number)
        if child is None:
            return
        getattr(self.bench.scheduler.lifecycle, word)(child)
        if word == "abort":
            self.aborted.add(child)
        self.settle()

    @rule(number=PICK)
    def preempt(self, number: int) -> None:
        running = self.bench.scheduler.table.running
        if running:
            self.bench.scheduler.lifecycle.preempt(running[number % len(running)])
            self.settle()

    @precondition(lambda self: not self.flying)
    @rule()
    def plan(self) -> None:
        plan = self.bench.plan()
        if plan is not None:
            self.flying.append(plan)

    @precondition(lambda self: len(self.flying) == 1 and self.result is None)
    @rule()
    def plan_ahead(self) -> None:
        plan = self.bench.scheduler.plan_ahead(self.bench.now_s)
        if plan is not None:
            self.flying.append(plan)
        self.settle()

    @precondition(lambda self: self.flying and self.result is None)
    @rule(fault=st.sampled_from(["none"] * 8 + ["raise", "row"]), number=PICK)
    def execute(self, fault: str, number: int) -> None:
        plan, faults = self.flying[0], self.bench.runner.faults
        if fault == "raise":
            faults.raise_on.add(plan.plan_id)
        if fault == "row":
            culprit = plan.rows[number % len(plan.rows)].child
            faults.row_errors[culprit] = NON_FINITE
            self.aborted.add(culprit)
        try:
            self.result = self.bench.runner.execute(plan)
        except FakeRunnerError:
            assert fault == "raise"
            self.bench.scheduler.fail()
            self.flying.clear()
        faults.row_errors.clear()
        self.settle()

    @precondition(lambda self: self.result is not None)
    @rule()
    def commit(self) -> None:
        assert self.result is not None
        self.bench.scheduler.commit(self.result)
        self.flying.popleft()
        self.result = None
        self.settle()

    @rule(number=PICK, most=st.integers(0, 4))
    def land(self, number: int, most: int) -> None:
        tiers = self.bench.tiers
        assert tiers is not None
        if tiers.open:
            tiers.finish(list(tiers.open)[number % len(tiers.open)], most)
            self.settle()

    @rule(limit=st.sampled_from([None, None, 6, 12]))
    def clear(self, limit: int | None) -> None:
        self.bench.scheduler.clear_cache(limit)
        self.settle()

    def settle(self) -> None:
        self.bench.collect()
        check_scheduler(self.bench.scheduler)

    def teardown(self) -> None:
        """Let everybody finish; then nothing may be left, and every token must be right."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        while self.flying:
            if self.result is None:
                self.result = bench.runner.execute(self.flying[0])
            bench.scheduler.commit(self.result)
            self.flying.popleft()
            self.result = None
            self.settle()
        bench.scheduler.clear_cache(None)
        for request in list(bench.scheduler.table):
            bench.scheduler.lifecycle.resume(request.child)
        bench.run(limit=5_000)
        for child in bench.specs:
            finish = bench.finish(child)
            assert finish is not None
            wanted, got = bench.wanted(child), bench.tokens(child)
            assert got == wanted[: len(got)]
            if finish in ("abort", "error"):
                error = bench.outputs[child][-1].error
                assert child in self.aborted or (
                    error is not None and error.status in (400, 429, 500)
                )
            else:
                assert got == wanted
        bench.assert_empty()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_words_break_no_promise() -> None:
    run(examples=12, steps=60)


@pytest.mark.slow
def test_random_words_break_no_promise_in_a_hundred_thousand_steps() -> None:
    run(examples=500, steps=200)
