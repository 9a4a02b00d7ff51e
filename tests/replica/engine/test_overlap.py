"""An engine that plans the next step while one executes: same tokens, same ends."""

from __future__ import annotations

from threading import Event

import pytest

from replica.sched.plan import ExecutionPlan, ExecutionResult
from tests.fakes.runner import FakeRunner
from tests.replica.engine.rig import WAIT_S, EngineRig, running
from tests.replica.sched.rig import VOCAB, sampling, tokens_of


@pytest.mark.parametrize("overlap", [False, True])
def test_many_children_in_little_room(overlap: bool) -> None:
    with running(total_blocks=24, overlap=overlap) as (rig, runner):
        children = [rig.submit(tokens_of(seed % 4, 20), sampling(12)) for seed in range(24)]
        rig.assert_right(runner, *children)
        rig.assert_nothing_left()


def test_the_next_plan_starts_without_waiting_for_the_commit_of_the_last() -> None:
    with running(overlap=True) as (rig, runner):
        gates = {number: Event() for number in (2, 3)}
        runner.faults.gates.update(gates)
        child = rig.submit(tokens_of(1, 9), sampling(6))
        rig.sink.wait(lambda: len(rig.sink.tokens(child)) == 1)
        rig.sink.wait(lambda: rig.engine.scheduler.last_plan == 3)
        gates[2].set()
        rig.sink.wait(lambda: len(rig.sink.tokens(child)) == 2)
        rig.sink.wait(lambda: rig.engine.scheduler.last_plan == 4)
        gates[3].set()
        rig.assert_right(runner, child)
        rig.assert_nothing_left()


def test_o1_abort_with_two_plans_in_flight() -> None:
    with running(overlap=True) as (rig, runner):
        gate = runner.faults.gates[2] = Event()
        child = rig.submit(tokens_of(1, 9), sampling(30))
        other = rig.submit(tokens_of(2, 9), sampling(30))
        rig.sink.wait(lambda: rig.engine.scheduler.last_plan >= 3)
        rig.engine.abort(child)
        gate.set()
        assert rig.sink.end_of(child).finish == "abort"
        rig.assert_right(runner, other)
        rig.assert_nothing_left()


def test_a_runner_that_raises_now_and_then_hurts_nobody() -> None:
    with running(overlap=True) as (rig, runner):
        runner.faults.raise_on |= {2, 5, 11, 17, 30}
        children = [rig.submit(tokens_of(seed, 20), sampling(9)) for seed in range(6)]
        rig.assert_right(runner, *children)
        assert rig.engine.load().failed_plans >= 2
        rig.assert_nothing_left()


def test_penalties_and_lone_tokens_go_without_overlap() -> None:
    with running(overlap=True) as (rig, runner):
        kinds = [sampling(7, presence_penalty=0.5), sampling(1), sampling(7)]
        children = [rig.submit(tokens_of(seed, 11), kind) for seed, kind in enumerate(kinds)]
        rig.assert_right(runner, *children)
        rig.assert_nothing_left()


class Traitor(FakeRunner):
    """Answers with another plan's number."""

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        result = super().execute(plan)
        return ExecutionResult(plan.plan_id + 1, result.rows, result.device_ms)


def test_a_result_of_another_plan_ends_the_engine_and_its_threads() -> None:
    rig = EngineRig(Traitor(16, 4, VOCAB), 4, overlap=True)
    rig.engine.start()
    error = rig.sink.end_of(rig.submit(tokens_of(1, 9))).error
    assert error is not None
    assert error.status == 503
    rig.engine.close(WAIT_S)
    assert not rig.engine.load().alive


def test_a_runner_that_hangs_holds_up_nobody_s_end() -> None:
    runner = FakeRunner(16, 4, VOCAB)
    gate = runner.faults.gates[1] = Event()
    rig = EngineRig(runner, 4, overlap=True)
    rig.engine.start()
    child = rig.submit(tokens_of(1, 9))
    assert runner.started.wait(WAIT_S)
    rig.engine.close(0.05)
    error = rig.sink.end_of(child).error
    assert error is not None
    assert error.status == 503
    gate.set()
    rig.engine.close(WAIT_S)
    assert runner.closed
