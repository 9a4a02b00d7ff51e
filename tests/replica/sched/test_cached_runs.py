"""What comes out of the cache gives the same tokens as computing it, at every cut."""

from __future__ import annotations

import pytest

from replica.sched.draft import FOUND_BLOCKS_PER_MS, LEAST_FOUND_BLOCKS, Draft
from tests.replica.sched.rig import (
    Bench,
    NextKey,
    add_mixed,
    chain_of,
    constant_key,
    real_key,
    sampling,
    short_key,
    tight_bench,
    tokens_of,
)

B = 4


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 2 * B + 1])
def test_c7_full_and_odd_lengths_three_times(length: int) -> None:
    bench = Bench(block_tokens=B)
    for turn in range(3):
        child = bench.add(tokens_of(1, length))
        bench.run()
        expected = 0 if turn == 0 else (length - 1) // B * B
        assert bench.cached(child) == expected
        assert bench.cached(child) < length
    bench.assert_right()
    bench.assert_empty()


@pytest.mark.parametrize("step_tokens", [1, 3, B, 7, 64])
def test_c11_every_cut_point_of_a_five_block_prompt(step_tokens: int) -> None:
    prompt = tokens_of(1, 5 * B)
    for cut in range(len(prompt) + 1):
        bench = Bench(block_tokens=B, max_step_tokens=step_tokens)
        bench.add((*prompt[:cut], *tokens_of(2, 3)), sampling(1))
        bench.run()
        warm = bench.add(prompt, sampling(6))
        bench.run()
        assert bench.cached(warm) == min(cut // B * B, (len(prompt) - 1) // B * B)
        bench.assert_right()
        bench.assert_empty()


@pytest.mark.parametrize("next_key", [constant_key, short_key])
def test_c2_a_broken_hash_costs_time_but_no_token(next_key: NextKey) -> None:
    bench = Bench(total_blocks=24, block_tokens=B, next_key=next_key, horizon_tokens=2)
    for turn in range(3):
        for seed in range(5):
            shared = tokens_of(9, 2 * B) if seed % 2 else tokens_of(seed, 2 * B)
            bench.add((*shared, *tokens_of(seed, turn + 5)), sampling(9))
        bench.run()
    assert bench.scheduler.cache.collisions > 0
    bench.assert_right()
    bench.assert_empty()


def test_c2_sixteen_bits_of_the_real_hash_still_give_right_tokens() -> None:
    def next_key(parent: bytes, tokens: bytes) -> bytes:
        return real_key(parent, tokens)[:2] + bytes(14)

    bench = Bench(1_024, B, max_step_tokens=1_024, max_running=64, next_key=next_key)
    for turn in range(2):
        for seed in range(220):
            bench.add((*tokens_of(seed, 3 * B), *tokens_of(turn, 2)), sampling(3))
        bench.run(limit=10_000)
    cache = bench.scheduler.cache
    assert cache.collisions > 0, "so many blocks make two with one key"
    assert bench.scheduler.planner.cached_tokens > 220 * 2 * B, "most of the second turn are hits"
    bench.assert_right()
    bench.assert_empty()


def test_c6_the_second_of_two_cold_twins_waits_for_the_first() -> None:
    bench = Bench(block_tokens=B, max_step_tokens=64)
    first, second = bench.add(tokens_of(1, 14)), bench.add(tokens_of(1, 14))
    plan = bench.step()
    assert plan is not None
    assert [row.child for row in plan.rows] == [first]
    assert bench.scheduler.planner.later["cold_prefix"] == 1
    plan = bench.step()
    assert plan is not None
    assert [(row.child, row.start) for row in plan.rows] == [(first, 14), (second, 12)]
    bench.run()
    assert bench.cached(second) == 12
    bench.assert_right()


def test_c6_a_chunked_leader_keeps_its_followers_waiting_and_others_pass() -> None:
    bench = Bench(block_tokens=B, max_step_tokens=12)
    leader = bench.add(tokens_of(1, 20))
    followers = [bench.add((*tokens_of(1, 16), *tokens_of(place, 3))) for place in range(3)]
    other = bench.add(tokens_of(7, 3))
    plans = [bench.step() for _ in range(3)]
    rows = [[row.child for row in plan.rows] for plan in plans if plan is not None]
    assert rows[:2] == [[leader], [leader, other]]
    assert rows[2] == [leader, *followers, other]
    bench.run()
    assert [bench.cached(child) for child in followers] == [16, 16, 16]
    bench.assert_right()


def test_a_follower_does_not_wait_for_a_leader_that_was_aborted_or_held() -> None:
    for word in ("abort", "hold"):
        bench = Bench(block_tokens=B, max_step_tokens=8)
        leader, follower = bench.add(tokens_of(1, 20)), bench.add(tokens_of(1, 20))
        bench.step()
        getattr(bench.scheduler.lifecycle, word)(leader)
        bench.run()
        assert bench.cached(follower) == 8
        bench.assert_right(follower)


def test_the_next_turn_hits_prompt_and_answer() -> None:
    bench = Bench(block_tokens=B)
    prompt = tokens_of(1, 10)
    bench.add(prompt, sampling(15))
    bench.run()
    answer = bench.tokens(1)
    turn = bench.add((*prompt, *answer, *tokens_of(2, 5)))
    bench.run()
    # The last token of an answer is never fed back, so its KV isn't there.
    assert bench.cached(turn) == (10 + 15 - 1) // B * B
    bench.assert_right()


def test_c13_a_stopped_turn_leaves_only_what_it_computed() -> None:
    bench = Bench(block_tokens=B)
    prompt = tokens_of(1, 10)
    first = bench.add(prompt, sampling(50))
    for _ in range(4):
        bench.step()
    bench.scheduler.lifecycle.abort(first)
    stopped = bench.tokens(first)
    again = bench.add((*prompt, *tokens_of(2, 4)))
    keeps = bench.add((*prompt, *stopped, *tokens_of(3, 4)))
    bench.run()
    assert bench.cached(again) == 8
    assert bench.cached(keeps) == (10 + len(stopped) - 1) // B * B
    bench.assert_right(again, keeps)
    bench.assert_empty()


def test_reads_can_be_skipped() -> None:
    bench = Bench(block_tokens=B)
    bench.add(tokens_of(1, 20))
    bench.run()
    child = bench.add(tokens_of(1, 20), skip_cache_read=True)
    bench.run()
    assert bench.cached(child) == 0
    child = bench.add(tokens_of(1, 20))
    bench.run()
    assert bench.cached(child) == 16
    bench.assert_right()
    bench.assert_empty()


def test_salted_chains_share_nothing() -> None:
    bench = Bench(block_tokens=B)
    prompt = tokens_of(1, 20)
    bench.add(prompt)
    bench.run()
    salted = chain_of(prompt, B, lambda parent, tokens: bench.next_key(b"salt" + parent, tokens))
    child = bench.add(prompt, chain=salted)
    bench.run()
    assert bench.cached(child) == 0


def test_clearing_in_the_middle_of_everything_changes_no_token() -> None:
    bench = Bench(total_blocks=16, block_tokens=B, horizon_tokens=2)
    for seed in range(6):
        bench.add(tokens_of(seed % 2, 11), sampling(12))
    while bench.scheduler.runnable:
        plan = bench.plan()
        bench.scheduler.cache.clear()
        if plan is not None:
            bench.finish_step(plan)
    bench.assert_right()
    bench.assert_empty()


@pytest.mark.parametrize("total_blocks", [10, 17, 64])
@pytest.mark.parametrize("step_tokens", [3, 8, 40])
@pytest.mark.parametrize("horizon_tokens", [1, 64])
def test_any_schedule_gives_the_plain_run_s_tokens(
    total_blocks: int, step_tokens: int, horizon_tokens: int
) -> None:
    bench = tight_bench(total_blocks, step_tokens, horizon_tokens)
    for index in range(14):
        add_mixed(bench, index)
        if index % 3 == 0:
            bench.step()
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def test_a_step_starts_no_more_once_it_found_many_blocks_and_nobody_is_left_out() -> None:
    """Each cached block takes its time, and a step has to be planned before the next one is due."""
    bench = Bench(
        8_000, 4, max_step_tokens=20_000, max_waiting_tokens=1 << 20, context_tokens=1 << 20
    )
    bench.runner.device_ms = lambda plan: 1.0 + 0.001 * plan.tokens
    head = tokens_of(0, 4 * (LEAST_FOUND_BLOCKS + 1))
    bench.add(head, sampling(1))
    bench.run()
    half = 4 * LEAST_FOUND_BLOCKS // 2
    for seed in range(5):
        bench.add((*head[:half], *tokens_of(seed, 3)), sampling(1))
    bench.add((*head, 1), sampling(1))
    started = []
    while bench.scheduler.runnable:
        plan = bench.step()
        assert plan is not None
        started.append(len(plan.rows))
    assert sorted(started) == [1, 1, 2, 2]
    assert bench.scheduler.planner.later["step"] == 3
    bench.assert_right()
    alone = bench.add((*head, 2), sampling(1))
    bench.step()
    assert bench.cached(alone) == len(head)


def test_a_step_that_runs_long_hides_the_start_of_more() -> None:
    quick, slow = Draft(False, 1.0), Draft(False, 400.0)
    quick.found_blocks = slow.found_blocks = LEAST_FOUND_BLOCKS
    assert quick.finds_too_many(1)
    assert not slow.finds_too_many(400 * FOUND_BLOCKS_PER_MS - LEAST_FOUND_BLOCKS)
    assert slow.finds_too_many(400 * FOUND_BLOCKS_PER_MS - LEAST_FOUND_BLOCKS + 1)
