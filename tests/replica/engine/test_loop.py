"""The engine on its own thread: every child ends exactly once, whatever happens."""

from __future__ import annotations

import time
import weakref
from threading import Event, Thread

import pytest

from events.cache import CacheOp
from events.errors import InvariantError
from replica.engine.messages import StepOutput
from replica.sched.plan import ExecutionPlan, ExecutionResult
from tests.collector import no_collector
from tests.fakes.runner import FakeRunner, FakeRunnerError
from tests.replica.cache.test_journal import replay
from tests.replica.engine.rig import WAIT_S, EngineRig, running
from tests.replica.sched.rig import VOCAB, chain_of, sampling, tokens_of


def test_children_of_many_threads_get_the_right_tokens() -> None:
    with running(total_blocks=40) as (rig, runner):
        requests = [rig.request(tokens_of(seed % 4, 20), sampling(12)) for seed in range(24)]

        def submit(part: int) -> None:
            for request in requests[part::3]:
                rig.engine.submit(request)

        threads = [Thread(target=submit, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        rig.assert_right(runner, *(request.child for request in requests))
        load = rig.engine.load()
        assert load.prompt_tokens_total == 24 * 20
        assert 0 < load.cached_tokens_total < load.prompt_tokens_total
        rig.assert_nothing_left()


def test_e6_replaying_the_journal_gives_the_index() -> None:
    with running(total_blocks=12) as (rig, runner):
        resident: set[bytes] = set()
        for seed in range(12):
            child = rig.submit(tokens_of(seed % 3, 17), sampling(9))
            rig.assert_right(runner, child)
            resident = replay(resident, rig.engine.drain_facts())
            assert resident == set(rig.engine.scheduler.cache.nodes())
        assert rig.engine.clear_cache() == len(resident) > 0
        facts = rig.engine.drain_facts()
        assert [op for op, _ in facts] == [CacheOp.CLEARED]


def test_a_bounded_cache_uses_no_more_blocks_until_it_is_unbounded() -> None:
    with running(total_blocks=40) as (rig, runner):
        rig.engine.clear_cache(limit_blocks=8)
        for seed in range(6):
            rig.assert_right(runner, rig.submit(tokens_of(seed, 17), sampling(9)))
            load = rig.engine.load()
            assert load.total_blocks == 8
            assert load.free_blocks + load.cached_blocks <= 8
        refused = rig.submit(tokens_of(9, 100))
        assert rig.sink.end_of(refused).error.code == "context_length_exceeded"
        rig.engine.clear_cache()
        rig.assert_right(runner, rig.submit(tokens_of(9, 100)))
        assert rig.engine.load().total_blocks == 40


def test_a_bound_that_comes_in_the_middle_of_a_step_holds_when_there_is_room() -> None:
    with running(total_blocks=40) as (rig, runner):
        rig.assert_right(runner, rig.submit(tokens_of(1, 60)))
        gate = runner.faults.gates[5] = Event()
        runner.started.clear()
        child = rig.submit(tokens_of(2, 17), sampling(9))
        assert runner.started.wait(WAIT_S)
        clearer = Thread(target=rig.engine.clear_cache, args=(12,))
        clearer.start()
        gate.set()
        clearer.join(WAIT_S)
        rig.assert_right(runner, child)
        rig.sink.wait(lambda: rig.engine.load().total_blocks == 12)
        assert rig.engine.load().free_blocks + rig.engine.load().cached_blocks <= 12


def test_keys_of_answers_chain_on_with_the_cluster_key() -> None:
    with running() as (rig, runner):
        prompt = tokens_of(1, 10)
        first = rig.submit(prompt, sampling(15))
        rig.assert_right(runner, first)
        again = rig.submit((*prompt, *rig.sink.tokens(first)))
        rig.assert_right(runner, again)
        assert rig.sink.end_of(again).cached_tokens == 24
        chain = chain_of((*prompt, *rig.sink.tokens(first)), 4)
        assert set(chain) <= set(rig.engine.scheduler.cache.nodes())


def test_an_idle_engine_sleeps() -> None:
    with running() as (rig, runner):
        rig.assert_right(runner, rig.submit(tokens_of(1, 5)))
        spent_s = time.process_time()
        Event().wait(0.4)
        assert time.process_time() - spent_s < 0.2
        assert rig.engine.load().steps == 4


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_o1_abort_around_a_step_gives_one_finish(when: str) -> None:
    with running() as (rig, runner):
        gate = runner.faults.gates[1] = Event()
        request = rig.request(tokens_of(1, 9), sampling(1 if when == "after" else 30))
        if when == "before":
            rig.engine.abort(request.child)
        rig.engine.submit(request)
        assert runner.started.wait(WAIT_S)
        if when == "during":
            rig.engine.abort(request.child)
            rig.engine.abort(request.child)
        gate.set()
        last = rig.sink.end_of(request.child)
        rig.engine.abort(request.child)
        # An abort of what was never submitted is forgotten; one that comes during a step wins.
        assert last.finish == {"before": "length", "during": "abort", "after": "length"}[when]
        if when == "during":
            assert rig.sink.tokens(request.child) == []
        other = rig.submit(tokens_of(2, 9))
        rig.assert_right(runner, other)
        rig.assert_nothing_left()


def test_hold_and_resume() -> None:
    with running() as (rig, runner):
        gate = runner.faults.gates[2] = Event()
        child = rig.submit(tokens_of(1, 9), sampling(30))
        rig.sink.wait(lambda: bool(rig.sink.tokens(child)))
        rig.engine.hold(child)
        gate.set()
        other = rig.submit(tokens_of(2, 9))
        rig.assert_right(runner, other)
        assert not rig.sink.ended(child)
        assert len(rig.sink.tokens(child)) == 2
        rig.engine.resume(child)
        rig.assert_right(runner, child)
        rig.assert_nothing_left()


def test_o1_two_hundred_aborted_children_leave_nothing() -> None:
    with running(total_blocks=48) as (rig, runner):
        children = [rig.submit(tokens_of(seed % 7, 30), sampling(500)) for seed in range(200)]
        rig.sink.wait(lambda: bool(rig.sink.outputs))
        for child in children:
            rig.engine.abort(child)
        for child in children:
            assert rig.sink.end_of(child).finish == "abort"
        rig.assert_right(runner, rig.submit(tokens_of(9, 9)))
        rig.assert_nothing_left()
        load = rig.engine.load()
        assert (load.waiting, load.running, load.queued_prefill_tokens) == (0, 0, 0)
        assert load.running_context_tokens == 0
        assert load.free_blocks + load.cached_blocks == load.total_blocks


def test_a_deadline_ends_a_child_even_if_the_engine_sleeps() -> None:
    with running() as (rig, _):
        child = rig.submit(tokens_of(1, 9), sampling(3_000), deadline_s=time.monotonic() + 0.3)
        rig.engine.hold(child)
        error = rig.sink.end_of(child).error
        assert error is not None
        assert error.code == "deadline_exceeded"


def test_o4_a_full_queue_and_a_full_inbox_say_so() -> None:
    with running(max_waiting_tokens=100) as (rig, runner):
        gate = runner.faults.gates[1] = Event()
        first = rig.submit(tokens_of(0, 20))
        assert runner.started.wait(WAIT_S)
        rest = [rig.submit(tokens_of(seed, 40)) for seed in range(1, 9)]
        refused_by_inbox = [child for child in rest if rig.sink.ended(child)]
        assert refused_by_inbox
        gate.set()
        ends = [rig.sink.end_of(child) for child in rest]
        errors = [end.error for end in ends if end.error is not None]
        assert len(errors) > len(refused_by_inbox)
        for error in errors:
            assert (error.status, error.reroute) == (429, True)
            assert error.retry_after_s is not None
        served = [end.child for end in ends if end.error is None]
        assert served
        rig.assert_right(runner, first, *served)
        rig.assert_nothing_left()


def test_what_can_not_be_taken_in_ends_with_an_error() -> None:
    with running() as (rig, runner):
        child = rig.submit((1, 2, 3, 4), chain=None)
        error = rig.sink.end_of(child).error
        assert error is not None
        assert error.status == 500
        rig.assert_right(runner, rig.submit(tokens_of(2, 9)))
        rig.assert_nothing_left()


def test_two_children_of_one_number_are_refused_to_the_caller() -> None:
    with running() as (rig, runner):
        request = rig.request(tokens_of(1, 9), sampling(9))
        gate = runner.faults.gates[1] = Event()
        rig.engine.submit(request)
        with pytest.raises(InvariantError):
            rig.engine.submit(request)
        gate.set()
        rig.assert_right(runner, request.child)


def test_a_runner_that_raises_now_and_then_hurts_nobody() -> None:
    with running() as (rig, runner):
        runner.faults.raise_on |= {2, 5, 11, 17, 30}
        children = [rig.submit(tokens_of(seed, 20), sampling(9)) for seed in range(6)]
        rig.assert_right(runner, *children)
        assert rig.engine.load().failed_plans >= 3
        rig.assert_nothing_left()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_failed_step_raised_is_freed_without_the_collector(overlap: bool) -> None:
    """It knows the frames that know the plan, and whoever waits for it."""
    raised: list[weakref.ref[BaseException]] = []

    class Told(FakeRunner):
        def execute(self, plan: ExecutionPlan) -> ExecutionResult:
            try:
                return super().execute(plan)
            except FakeRunnerError as error:
                raised.append(weakref.ref(error))
                raise

    rig = EngineRig(runner := Told(64, 4, VOCAB), 4, overlap=overlap)
    runner.faults.raise_on |= {2, 5}
    with no_collector():
        rig.engine.start()
        rig.assert_right(runner, rig.submit(tokens_of(1, 20), sampling(9)))
        rig.engine.close(WAIT_S)
        assert [ref() for ref in raised] == [None, None]


def test_a_lost_device_ends_the_engine_and_every_child_and_later_ones_at_once() -> None:
    with running() as (rig, runner):
        child = rig.submit(tokens_of(1, 9), sampling(2_000))
        rig.sink.wait(lambda: bool(rig.sink.tokens(child)))
        runner.faults.always = True
        others = [rig.submit(tokens_of(seed, 9)) for seed in range(2, 40)]
        ends = [rig.sink.end_of(one).error for one in (child, *others)]
        assert {error.status for error in ends if error is not None} == {500, 503}
        rig.sink.wait(lambda: not rig.engine.load().alive)
        late = rig.submit(tokens_of(50, 9))
        assert rig.sink.ended(late)
        error = rig.sink.end_of(late).error
        assert error is not None
        assert (error.status, error.reroute) == (503, True)
        assert rig.engine.clear_cache() == 0
        rig.engine.abort(late)


class Traitor(FakeRunner):
    """Answers with another plan's number."""

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        result = super().execute(plan)
        return ExecutionResult(plan.plan_id + 1, result.rows, result.device_ms)


def test_a_result_of_another_plan_is_loud_and_ends_the_engine() -> None:
    rig = EngineRig(Traitor(16, 4, VOCAB), 4)
    rig.engine.start()
    error = rig.sink.end_of(rig.submit(tokens_of(1, 9))).error
    assert error is not None
    assert error.status == 503
    assert not rig.engine.load().alive
    rig.engine.close(WAIT_S)


def test_close_ends_every_child_wherever_it_is() -> None:
    with running(max_running=2) as (rig, runner):
        gate = runner.faults.gates[3] = Event()
        started = rig.submit(tokens_of(1, 9), sampling(900))
        rig.sink.wait(lambda: len(rig.sink.tokens(started)) >= 2)
        others = [rig.submit(tokens_of(seed, 9), sampling(900)) for seed in range(2, 6)]
        rig.engine.hold(others[0])
        closer = Thread(target=rig.engine.close, args=(WAIT_S,))
        closer.start()
        gate.set()
        closer.join(WAIT_S)
        ends = {child: rig.sink.end_of(child).error for child in (started, *others)}
        assert all(error is not None and error.status == 503 for error in ends.values())
        reroutes = {child for child, error in ends.items() if error is not None and error.reroute}
        assert started not in reroutes
        assert others[-1] in reroutes
        rig.engine.close(WAIT_S)
        assert rig.sink.ended(rig.submit(tokens_of(9, 9)))


def test_a_runner_that_hangs_holds_up_nobody_s_end() -> None:
    runner = FakeRunner(16, 4, VOCAB)
    gate = runner.faults.gates[1] = Event()
    rig = EngineRig(runner, 4)
    rig.engine.start()
    child = rig.submit(tokens_of(1, 9))
    assert runner.started.wait(WAIT_S)
    rig.engine.close(0.05)
    error = rig.sink.end_of(child).error
    assert error is not None
    assert error.status == 503
    assert not rig.engine.load().alive
    gate.set()
    rig.engine.close(WAIT_S)
    assert runner.closed
    assert len(rig.sink.outputs[child]) == 1


def test_closing_before_the_start_still_answers() -> None:
    rig = EngineRig(FakeRunner(16, 4, VOCAB), 4)
    child = rig.submit(tokens_of(1, 9))
    rig.engine.close()
    assert rig.sink.ended(child)


def test_a_sink_may_call_the_engine_and_one_that_raises_does_not_stop_it() -> None:
    with running() as (rig, runner):

        def abort_at_three(step: StepOutput) -> None:
            for output in step.children:
                if len(rig.sink.tokens(output.child)) == 3:
                    rig.engine.abort(output.child)
                    raise RuntimeError("a sink must not do this")

        rig.sink.on_output = abort_at_three
        child = rig.submit(tokens_of(1, 9), sampling(50))
        assert rig.sink.end_of(child).finish == "abort"
        rig.sink.on_output = None
        rig.assert_right(runner, rig.submit(tokens_of(2, 9)))


def test_load_reports_the_last_dispatch_of_every_router() -> None:
    with running() as (rig, runner):
        numbers = [(1, "a"), (5, "a"), (3, "a"), (7, "b"), (9, "")]
        for number, boot in numbers:
            child = rig.submit(tokens_of(number, 5), router_boot=boot, dispatch_seq=number)
            rig.assert_right(runner, child)
        assert rig.engine.load().seen == {"a": 5, "b": 7}
        for number in range(200):
            rig.submit(tokens_of(1, 5), sampling(1), router_boot=f"r{number}", dispatch_seq=number)
        rig.sink.end_of(max(rig.specs))
        assert len(rig.engine.load().seen) == 64
        assert rig.engine.load().seen["r199"] == 199


def test_o8_a_failing_runner_puts_no_token_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(FakeRunner):
        def execute(self, plan: ExecutionPlan) -> ExecutionResult:
            raise RuntimeError(f"bad tokens {plan.rows[0].token_ids}")

    rig = EngineRig(Talkative(16, 4, VOCAB), 4)
    rig.engine.start()
    rig.sink.end_of(rig.submit((424, 242, 424)))
    rig.engine.close(WAIT_S)
    assert "RuntimeError at execute" in caplog.text
    assert "424" not in caplog.text
