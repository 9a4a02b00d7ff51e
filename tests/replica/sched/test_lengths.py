"""Learnt lengths of answers: what is reserved, and how that follows retractions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.sched.ledger import HORIZON_TOKENS
from replica.sched.lengths import (
    ENOUGH,
    KEPT,
    MAX_SOURCES,
    MOST_QUANTILE,
    START_QUANTILE,
    OutputLengths,
)
from replica.sched.request import Request
from tests.replica.sched.rig import Bench, sampling, tokens_of


def request(generated: int = 0, most: int = 1_000, **fields: object) -> Request:
    bench = Bench(total_blocks=4_000)
    ignore = bool(fields.pop("ignore_eos", False))
    bench.add(tokens_of(1, 5), sampling(most, ignore_eos=ignore), **fields)
    (spec,) = bench.specs.values()
    made = Request(spec)
    made.tokens.extend([1] * generated)
    return made


def taught(*lengths: int, tenant: str = "t") -> OutputLengths:
    known = OutputLengths(HORIZON_TOKENS)
    for length in lengths:
        known.ended(request(length, tenant=tenant))
    return known


def test_nothing_learnt_looks_a_little_ahead() -> None:
    known = OutputLengths(HORIZON_TOKENS)
    assert known.rest(request()) == (HORIZON_TOKENS, False)
    assert known.rest(request(most=10)) == (10, True)


def test_ignore_eos_reserves_everything() -> None:
    known = taught(*[5] * ENOUGH)
    assert known.rest(request(3, 1_000, ignore_eos=True)) == (997, True)


def test_the_rest_is_a_quantile_of_those_that_went_as_far() -> None:
    known = taught(*range(10, 110, 10))
    known.quantile = 0.5
    assert known.rest(request()) == (50, True)
    assert known.rest(request(50)) == (30, True)
    assert known.rest(request(95)) == (5, True)
    assert known.rest(request(200)) == (HORIZON_TOKENS, False)
    assert known.rest(request(0, 20)) == (20, True)


def test_tenants_have_their_own_once_they_have_enough() -> None:
    known = taught(*[10] * 20)
    for _ in range(ENOUGH - 1):
        known.ended(request(300, tenant="long"))
    known.quantile = 0.5
    assert known.rest(request(tenant="long")) == (10, True)
    known.ended(request(300, tenant="long"))
    assert known.rest(request(tenant="long")) == (300, True)
    assert known.rest(request(tenant="t")) == (10, True)


def test_each_adapter_has_its_own() -> None:
    known = taught(*[10] * 20)
    for _ in range(ENOUGH):
        known.ended(request(300, adapter="novels"))
    known.quantile = 0.5
    assert known.rest(request(adapter="novels")) == (300, True)
    assert known.rest(request()) == (10, True)


def test_what_was_cut_off_says_nothing_of_longer_ones() -> None:
    """Scores, classes and warm-ups ask for one token each; then somebody asks for a text."""
    known = OutputLengths(HORIZON_TOKENS)
    for _ in range(ENOUGH):
        known.ended(request(300))
    for _ in range(100):
        known.ended(request(1, most=1))
    assert known.rest(request()) == (300, True)
    assert known.rest(request(most=1)) == (1, True)
    assert known.rest(request(most=200)) == (200, True)


def test_who_always_gets_as_far_as_it_may_is_believed_to_do_so_again() -> None:
    known = OutputLengths(HORIZON_TOKENS)
    for _ in range(ENOUGH):
        known.ended(request(200, most=200))
    assert known.rest(request(most=200)) == (200, True)
    assert known.rest(request(150, most=200)) == (50, True)
    assert known.rest(request(most=400)) == (HORIZON_TOKENS, False)


def test_prompts_computed_for_others_are_no_answers() -> None:
    known = OutputLengths(HORIZON_TOKENS)
    before = known.quantile
    for _ in range(ENOUGH):
        known.ended(request(1, most=1, write_to="store"))
    assert known.quantile == before
    assert known.rest(request(most=1_000)) == (HORIZON_TOKENS, False)


def test_an_answer_that_a_stop_string_ended_is_an_answer() -> None:
    bench = Bench(total_blocks=64)
    for answered in (False, True):
        for _ in range(ENOUGH):
            child = bench.add(tokens_of(1, 5), sampling(1_000))
            for _ in range(6):
                bench.step()
            bench.scheduler.lifecycle.abort(child, answered)
            bench.run()
        known = bench.scheduler.lengths.rest(request())
        assert known.ends == answered
    assert known.tokens < 10


def test_what_is_kept_is_bounded_and_the_old_is_forgotten() -> None:
    known = taught(*[500] * KEPT, *[10] * KEPT)
    assert known.rest(request()) == (10, True)
    for number in range(MAX_SOURCES + 50):
        known.ended(request(7, tenant=f"t{number}"))
    assert len(known._sources) == MAX_SOURCES


def test_the_quantile_follows_the_retractions() -> None:
    known = OutputLengths(HORIZON_TOKENS)
    start = known.quantile
    for _ in range(100):
        known.retracted()
    assert known.quantile == MOST_QUANTILE
    for _ in range(1_000):
        known.ended(request(5))
    assert known.quantile < start


def test_a_scheduler_that_knows_the_lengths_retracts_nobody() -> None:
    retractions = []
    for _ in range(2):
        bench = Bench(24, 4, max_step_tokens=64, horizon_tokens=1)
        for turn in range(3):
            for seed in range(12):
                bench.add(tokens_of(100 * turn + seed, 7), sampling(25))
            before = bench.scheduler.lifecycle.preemptions
            bench.run()
            retractions.append(bench.scheduler.lifecycle.preemptions - before)
            assert turn or bench.scheduler.lengths.quantile > START_QUANTILE
        bench.assert_right()
    assert retractions[0] > 0
    assert retractions[2] == 0


@pytest.mark.parametrize(("blocks", "comes"), [(73, True), (75, False)])
def test_some_blocks_stay_free_when_a_newcomer_comes_beside_others(
    blocks: int, comes: bool
) -> None:
    """Both need 52 + `blocks` of the 128 in all; two of them are for emergencies."""
    bench = Bench(total_blocks=128, block_tokens=4, max_step_tokens=600)
    bench.add(tokens_of(1, 200), sampling(4))
    bench.step()
    bench.add(tokens_of(2, 4 * blocks), sampling(4))
    bench.step()
    assert bench.scheduler.planner.later["headroom"] == (not comes)
    assert len(bench.scheduler.table.running) == 1 + comes
    bench.run()
    bench.assert_right()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=2, max_size=12),
    st.integers(24, 60),
)
def test_what_is_known_to_come_is_reserved_to_the_token(
    sizes: list[tuple[int, int]], blocks: int
) -> None:
    """Answers of known length: whoever is let in is never put out again, whatever the mix."""
    bench = Bench(blocks, 4, max_step_tokens=64)
    for seed, (prompt, answer) in enumerate(sizes):
        bench.add(tokens_of(seed, prompt), sampling(answer, ignore_eos=True))
        if seed % 3 == 0:
            bench.step()
    bench.run()
    assert bench.scheduler.lifecycle.preemptions == 0
    bench.assert_right()


def test_who_ends_soon_makes_room_for_who_goes_on() -> None:
    """The most that is needed at any moment, not the sum of what each needs at its end."""
    bench = Bench(32, 4, max_step_tokens=64)
    sizes = [(36, 4), (40, 4), (4, 60)]
    assert sum(bench.limits.blocks(prompt + answer) for prompt, answer in sizes) > 32
    for seed, (prompt, answer) in enumerate(sizes):
        bench.add(tokens_of(seed, prompt), sampling(answer, ignore_eos=True))
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.table.running) == 3
    bench.run()
    assert bench.scheduler.lifecycle.preemptions == 0
    bench.assert_right()
