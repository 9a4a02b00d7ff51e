"""Abort at every stage, in every order with commit: one finish, nothing left, nobody else hurt."""

from __future__ import annotations

from itertools import permutations

import pytest

from replica.sched.plan import ChildId
from tests.replica.sched.rig import Bench, sampling, tokens_of

STAGES = ("queued", "held_back", "chunk", "decode", "held", "preempted", "finished", "unknown")


def bring(bench: Bench, stage: str) -> ChildId:
    """A child that has got as far as `stage`."""
    if stage == "unknown":
        return ChildId(99)
    if stage == "held_back":
        bench.add(tokens_of(1, 40))
        bench.step()
        child = bench.add(tokens_of(1, 40))
        bench.step()
        return child
    child = bench.add(tokens_of(1, 30), sampling(2 if stage == "finished" else 20))
    for _ in range({"queued": 0, "chunk": 1, "finished": 9}.get(stage, 4)):
        bench.step()
    request = bench.scheduler.table.get(child)
    if stage == "held":
        bench.scheduler.lifecycle.hold(child)
    if stage == "preempted" and request is not None:
        bench.scheduler.lifecycle.preempt(request)
    return child


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_o1_abort_at_every_stage(stage: str, in_flight: bool) -> None:
    bench = Bench(total_blocks=64)
    child = bring(bench, stage)
    other = bench.add(tokens_of(5, 9), sampling(6))
    before = len(bench.tokens(child)) if child in bench.outputs else 0
    plan = bench.plan() if in_flight else None
    for _ in range(3):
        bench.scheduler.lifecycle.abort(child)
    if plan is not None:
        bench.finish_step(plan)
    bench.run()
    if child in bench.outputs:
        assert bench.finish(child) == ("length" if stage == "finished" else "abort")
        assert len(bench.tokens(child)) == before
        assert sum(output.finish is not None for output in bench.outputs[child]) == 1
    bench.assert_right(other)
    bench.assert_empty()


WORDS = ("abort", "commit", "hold", "resume", "clear")


@pytest.mark.parametrize("order", list(permutations(WORDS)))
@pytest.mark.parametrize("fails", [False, True])
def test_abort_and_commit_in_all_orders(order: tuple[str, ...], fails: bool) -> None:
    bench = Bench(total_blocks=12)
    child = bench.add(tokens_of(1, 9), sampling(1 if len(order[0]) % 2 else 3))
    other = bench.add(tokens_of(2, 9), sampling(3))
    plan = bench.plan()
    assert plan is not None
    if fails:
        bench.runner.faults.raise_on.add(plan.plan_id)
    for word in order:
        if word == "commit":
            bench.finish_step(plan)
        elif word == "clear":
            bench.scheduler.cache.clear()
        else:
            getattr(bench.scheduler.lifecycle, word)(child)
    bench.collect()
    bench.run()
    committed_first = order.index("commit") < order.index("abort")
    assert len(bench.tokens(child)) <= committed_first
    assert sum(output.finish is not None for output in bench.outputs[child]) == 1
    bench.assert_right(other)
    bench.assert_empty()


def test_an_abort_in_flight_publishes_only_what_was_computed() -> None:
    bench = Bench(block_tokens=4, max_step_tokens=10)
    child = bench.add(tokens_of(1, 40))
    plan = bench.plan()
    assert plan is not None
    bench.scheduler.lifecycle.abort(child)
    bench.finish_step(plan)
    bench.assert_empty()
    again = bench.add(tokens_of(1, 40))
    bench.run()
    assert bench.cached(again) == 8
    bench.assert_right(again)


def test_k1_blocks_of_an_aborted_child_are_not_reused_while_in_flight() -> None:
    bench = Bench(total_blocks=4, block_tokens=4, max_step_tokens=64)
    child = bench.add(tokens_of(1, 14), sampling(1))
    plan = bench.plan()
    assert plan is not None
    bench.scheduler.lifecycle.abort(child)
    victim = bench.add(tokens_of(2, 14), sampling(1))
    assert bench.scheduler.cache.available == 0
    bench.finish_step(plan)
    bench.run()
    bench.assert_right(victim)
    bench.assert_empty()
