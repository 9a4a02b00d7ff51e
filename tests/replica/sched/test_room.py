"""What a router is told of room, against whom the scheduler lets in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.sched.room import Room
from tests.replica.sched.rig import Bench, sampling, tokens_of

sizes = st.tuples(st.integers(1, 30), st.integers(1, 40))


def _started(bench: Bench, number: int) -> bool:
    return any(request.child == number for request in bench.scheduler.table.running)


@settings(max_examples=60)
@given(st.lists(sizes, min_size=1, max_size=8), sizes, st.integers(24, 90), st.integers(0, 12))
def test_who_needs_no_more_than_is_spare_is_let_in_at_once(
    running: list[tuple[int, int]], newcomer: tuple[int, int], blocks: int, steps: int
) -> None:
    bench = Bench(blocks, 4, max_step_tokens=200, max_running=20)
    for seed, (prompt, answer) in enumerate(running):
        bench.add(tokens_of(seed, prompt), sampling(answer, ignore_eos=True))
    for _ in range(steps):
        bench.step()
    room, (prompt, answer) = bench.scheduler.room(bench.now_s), newcomer
    waiting = len(bench.scheduler.table.waiting)
    number = bench.add(tokens_of(99, prompt), sampling(answer, ignore_eos=True))
    bench.step()
    if not waiting and bench.limits.blocks(prompt + answer) + 1 <= room.spare_blocks:
        assert _started(bench, number) or bench.finish(number) is not None
    bench.run()
    bench.assert_right()


def test_where_most_is_idle_all_of_it_is_spare() -> None:
    bench = Bench(total_blocks=64, block_tokens=4, max_step_tokens=64)
    bench.add(tokens_of(1, 20), sampling(30, ignore_eos=True))
    bench.step()
    assert bench.scheduler.room(bench.now_s) == Room(64 - 5)


def test_what_is_free_but_promised_is_not_spare_and_comes_back_with_the_first_end() -> None:
    bench = Bench(total_blocks=64, block_tokens=4, max_step_tokens=400)
    bench.add(tokens_of(1, 80), sampling(20, ignore_eos=True))
    bench.add(tokens_of(2, 80), sampling(40, ignore_eos=True))
    bench.step()
    timing = bench.scheduler.timing
    timing.step_ms = 10.0
    room = bench.scheduler.room(bench.now_s)
    assert bench.scheduler.cache.available == 64 - 40
    # 60 more tokens of both, and one block for emergencies; at most as much room as that leaves.
    assert 24 - 1 - 16 <= room.spare_blocks <= 24 - 1 - 10
    assert room.end_ms == 10.0 * 19
    # 20 blocks each; half of them after 19 tokens, the others 20 later.
    assert room.block_ms == 2 * 10.0 * (20 * 20) / 40**2
    third = bench.add(tokens_of(3, 56), sampling(60, ignore_eos=True))
    while not _started(bench, third):
        bench.step()
    assert bench.finish(1) is not None
    bench.run()
    bench.assert_right()


def test_who_waits_already_leaves_less_than_nothing() -> None:
    bench = Bench(total_blocks=32, block_tokens=4, max_step_tokens=400)
    bench.add(tokens_of(1, 100), sampling(20, ignore_eos=True))
    bench.step()
    before = bench.scheduler.room(bench.now_s).spare_blocks
    bench.add(tokens_of(2, 40), sampling(20, ignore_eos=True))
    bench.step()
    assert bench.scheduler.room(bench.now_s).spare_blocks == before - 15
    bench.run()
    bench.assert_right()
