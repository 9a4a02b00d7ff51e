"""Chunks: sized by the target for the gap between tokens, shared shortest first, nobody starved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from events.load import DecodeFit, PrefillFit
from replica.sched.chunks import MIN_CHUNK_TOKENS, ChunkBudget, StepModel, shortest_first
from replica.sched.plan import ExecutionPlan
from replica.sched.policies.deadline import Deadline
from replica.sched.request import Request
from tests.replica.sched.rig import Bench, sampling, tokens_of

MODEL = StepModel(
    PrefillFit(a=10.0, b=0.5, c=1e-3, confidence=1.0),
    DecodeFit(base=8.0, per_row=1.0, per_context=1e-3, confidence=1.0),
    error=0.0,
)


def requests(*lengths: int, **fields: object) -> list[Request]:
    bench = Bench(total_blocks=4_000)
    for seed, length in enumerate(lengths):
        bench.add(tokens_of(seed, length), **fields)
    return [Request(spec, (spec.arrival_s, spec.child)) for spec in bench.specs.values()]


def device_ms(plan: ExecutionPlan) -> float:
    """What the model says, with no noise."""
    total = MODEL.decode.base
    for row in plan.rows:
        count = len(row.token_ids)
        if count == 1:
            total += 1.0 + 1e-3 * row.start
        else:
            total += MODEL.prefill.predict_ms(row.start, count) - MODEL.prefill.a
    return total


@pytest.mark.parametrize("start", [0, 700, 5_000])
@pytest.mark.parametrize("target_ms", [30.0, 50.0, 120.0])
def test_the_chunk_is_the_largest_that_the_target_allows(start: int, target_ms: float) -> None:
    (prompt, *decodes) = requests(9_000, 10, 10, 10)
    prompt.computed = start
    for decode in decodes:
        decode.computed = 9
    count = ChunkBudget(10_000, target_ms, decodes, MODEL).take(prompt)
    alone_ms = MODEL.decodes_ms(decodes)

    def step_ms(tokens: int) -> float:
        return alone_ms + MODEL.prefill.predict_ms(start, tokens) - MODEL.prefill.a

    if count == MIN_CHUNK_TOKENS:
        assert step_ms(count + 1) > target_ms
    else:
        assert step_ms(count) <= target_ms + 1e-6 < step_ms(count + 1)


def test_the_less_the_step_times_are_known_the_more_of_the_target_is_left() -> None:
    prompt, decode = requests(9_000, 10)
    vague = replace(MODEL, error=1.0)
    assert ChunkBudget(10_000, 120.0, [decode], vague).take(prompt) == ChunkBudget(
        10_000, 60.0, [decode], MODEL
    ).take(prompt)


def test_without_decodes_or_a_target_only_the_token_budget_counts() -> None:
    prompt, decode = requests(9_000, 10)
    assert ChunkBudget(600, 20.0, [], MODEL).take(prompt) == 600
    assert ChunkBudget(600, 0.0, [decode], MODEL).take(prompt) == 600


def test_a_target_that_can_not_be_met_still_lets_prefill_go_on() -> None:
    prompt, *decodes = requests(9_000, *([10] * 200))
    budget = ChunkBudget(10_000, 1.0, decodes, MODEL)
    assert budget.take(prompt) >= MIN_CHUNK_TOKENS
    assert budget.take(prompt) == 0


def test_crumbs_are_not_dealt_out_but_ends_are() -> None:
    first, second, third = requests(95, 90, 5)
    budget = ChunkBudget(100, 0.0, [], MODEL)
    assert budget.take(first) == 95
    assert budget.take(second) == 5
    timed = ChunkBudget(1_000, 62.0, [third], MODEL)
    assert timed.take(first) < 95
    assert timed.take(second) == 0


def test_shorter_ones_go_first_unless_an_older_one_has_waited_long_enough() -> None:
    long, short = requests(6_000, 10)
    assert shortest_first([long, short], MODEL) == [short, long]
    (late,) = requests(10, arrival_s=1_000.0)
    assert shortest_first([late, long], MODEL) == [long, late]
    (urgent,) = requests(6_000, priority=1)
    assert shortest_first([long, short, urgent], MODEL)[0] is urgent


def test_S6_what_is_being_computed_grows_no_older_by_it_and_what_waits_does() -> None:
    (long,) = requests(6_000)
    alone_ms = MODEL.prefill.predict_ms(0, 6_000)
    (late,) = requests(100, arrival_s=0.9 * alone_ms / 1e3)
    long.computed = 5_500
    assert shortest_first([long, late], MODEL) == [late, long]
    long.computed = 0
    (much_later,) = requests(100, arrival_s=2.1 * alone_ms / 1e3)
    assert shortest_first([long, much_later], MODEL) == [long, much_later]


def test_S6_what_ends_with_a_step_does_not_wait_for_a_piece_of_what_goes_on() -> None:
    short, long = requests(100, 6_000)
    budget = ChunkBudget(1_000, 0.0, [], MODEL)
    assert budget.take(short) == 100
    assert budget.take(long) == 0
    rest = long
    rest.computed = 5_950
    assert budget.take(rest) == 50, "it ends too"
    goes_on, short = requests(6_000, 100)
    budget = ChunkBudget(1_000, 0.0, [], MODEL)
    assert (budget.take(goes_on), budget.take(short)) == (1_000, 0)
    crumb = ChunkBudget(116, 0.0, [], MODEL)
    assert (crumb.take(short), crumb.take(goes_on)) == (100, 16), "dearer to put off than to do"


def test_whoever_decodes_gets_its_token_in_every_step_whatever_else_waits() -> None:
    bench = Bench(total_blocks=600, max_step_tokens=20, max_running=12, policy=Deadline())
    decodes = [bench.add(tokens_of(seed, 4), sampling(30), priority=-5) for seed in range(4)]
    for _ in range(3):
        bench.step()
    for seed in range(4, 12):
        bench.add(tokens_of(seed, 200), sampling(1), first_by_s=bench.now_s + 1.0)
    while not all(bench.finish(child) for child in decodes):
        going = {child for child in decodes if bench.finish(child) is None}
        plan = bench.step()
        assert plan is not None
        assert going <= {row.child for row in plan.rows}
    bench.run()
    bench.assert_empty()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    bench = Bench(total_blocks=600, max_step_tokens=16)
    long = bench.add(tokens_of(1, 1_000), sampling(1))
    bench.step()
    short = bench.add(tokens_of(2, 12), sampling(1), arrival_s=1.0)
    bench.step()
    assert bench.finish(short) == "length"
    assert bench.finish(long) is None
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_no_stream_of_short_prompts_starves_a_long_one() -> None:
    bench = Bench(total_blocks=600, max_step_tokens=16)
    long = bench.add(tokens_of(1, 400), sampling(1))
    for seed in range(2, 400):
        bench.add(tokens_of(seed, 12), sampling(1))
        bench.step()
        if bench.finish(long) is not None:
            break
    assert bench.finish(long) == "length"
    assert len(bench.outputs) < 60
    bench.run()
    bench.assert_right()


def test_steps_that_decode_keep_to_the_target_once_the_times_are_learnt() -> None:
    bench = Bench(
        total_blocks=2_000, max_step_tokens=2_000, itl_target_ms=60.0, context_tokens=1 << 20
    )
    bench.runner.device_ms = device_ms
    decodes = [bench.add(tokens_of(seed, 20), sampling(300)) for seed in range(4)]
    for _ in range(30):
        bench.step()
    first = bench.add(tokens_of(9, 600), sampling(1))
    while bench.finish(first) is None:
        bench.step()
    long = bench.add(tokens_of(10, 1_500), sampling(1))
    gaps = []
    while bench.finish(long) is None:
        plan = bench.step()
        assert plan is not None
        assert {row.child for row in plan.rows} >= set(decodes)
        gaps.append(device_ms(plan))
    assert max(gaps) < 66.0
    assert sorted(gaps)[len(gaps) // 2] > 40.0
    bench.run()
    bench.assert_right()


def test_only_so_many_prompts_take_turns() -> None:
    bench = Bench(total_blocks=600, max_step_tokens=64, max_prefills=3)
    for seed in range(6):
        bench.add(tokens_of(seed, 200), sampling(1))
    bench.step()
    assert len(bench.scheduler.table.running) == 3
    assert bench.scheduler.planner.later["prefills"] == 1
    bench.run()
    bench.assert_right()


def test_v38_a_middle_chunk_publishes_only_what_it_computed() -> None:
    bench = Bench(total_blocks=64, block_tokens=4, max_step_tokens=10)
    child = bench.add(tokens_of(1, 30), sampling(1))
    bench.step()
    request = bench.scheduler.table.get(child)
    assert request is not None
    assert (request.committed, len(request.nodes), len(bench.outputs[child])) == (10, 2, 0)
    bench.run()
    bench.assert_right()


def test_a_fit_that_says_that_prefill_takes_no_time_stops_nobody() -> None:
    prompt, decode = requests(9_000, 10)
    free = StepModel(PrefillFit(a=1.0, b=0.0, c=0.0, confidence=0.1), MODEL.decode, error=0.0)
    assert ChunkBudget(600, 50.0, [decode], free).take(prompt) == 600
