"""The engine over its tiers: what the device lost comes back, and nothing that goes wrong shows."""

from __future__ import annotations

import pytest

from configs.schema import KvConfig
from kvstore.tier import Health
from replica.engine.messages import StepOutput
from replica.sched.plan import ChildId
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.slow_tier import SlowTier
from tests.replica.sched.rig import sampling, tokens_of
from tests.replica.tiers.rig import BLOCK_TOKENS, tiered
from tests.waiting import wait_until

PROMPT = tokens_of(1, 26)
"""Six full blocks and a rest."""


def test_C11_a_prefix_comes_back_from_the_host_at_every_cut() -> None:
    with tiered(max_step_tokens=8) as (rig, runner, _):
        for length in (5, 8, 9, 16, 17, 24, 25, 26):
            rig.assert_right(runner, rig.submit(PROMPT[:length]))
            rig.forget()
            again = rig.submit(PROMPT[:length])
            rig.assert_right(runner, again)
            assert rig.sink.end_of(again).cached_tokens == (length - 1) // 4 * 4
            rig.forget()
        rig.assert_nothing_left()


def test_tails_come_behind_what_the_device_has() -> None:
    with tiered() as (rig, runner, mover):
        rig.run(PROMPT)
        rig.forget()
        rig.run(PROMPT[:9])
        scattered = len(mover.scattered)
        again = rig.submit(PROMPT)
        rig.assert_right(runner, again)
        assert len(mover.scattered) == scattered + 4
        assert rig.sink.end_of(again).cached_tokens == 24


def test_what_was_generated_comes_back_too() -> None:
    with tiered() as (rig, runner, _):
        first = rig.submit(PROMPT, sampling(14))
        rig.assert_right(runner, first)
        rig.forget()
        turn = (*PROMPT, *rig.sink.tokens(first), *tokens_of(3, 5))
        second = rig.submit(turn)
        rig.assert_right(runner, second)
        assert rig.sink.end_of(second).cached_tokens == (26 + 14 - 1) // 4 * 4


def test_what_was_used_twice_comes_back_from_the_remote_tier() -> None:
    far = SlowTier("far", trusted=False)
    with tiered(far=far) as (rig, runner, _):
        rig.run(PROMPT)
        rig.settle()
        assert not far.written
        rig.run(PROMPT)
        rig.settle()
        assert len(far.written) == 7
        rig.engine.clear_cache(below=False)
        again = rig.submit(PROMPT)
        rig.assert_right(runner, again)
        assert rig.sink.end_of(again).cached_tokens == 24
        rig.run(PROMPT)
        rig.settle()
        assert len(far.written) == 7


def test_a_public_prefix_is_shared_through_the_tiers_and_nothing_else_C5() -> None:
    near = MemoryTier(1 << 24)
    with tiered(near) as (rig, runner, _):
        rig.run(PROMPT, salt=b"one", cut=2)
        rig.forget()
        other = rig.submit(PROMPT, salt=b"two", cut=2)
        rig.assert_right(runner, other)
        assert rig.sink.end_of(other).cached_tokens == 8
        rig.settle()
        assert near.stats().blocks == 2 + 2 * 5


def test_C5_another_tenant_misses_in_every_tier() -> None:
    near, far = MemoryTier(1 << 24), SlowTier("far", trusted=False)
    with tiered(near, far) as (rig, runner, _):
        for salt in (b"one", b"one", b"two"):
            child = rig.submit(PROMPT, salt=salt)
            rig.assert_right(runner, child)
            rig.forget()
        assert rig.sink.end_of(child).cached_tokens == 0
        assert near.stats().blocks == 14


def test_K7_other_weights_never_meet() -> None:
    near = MemoryTier(1 << 24)
    with tiered(near) as (rig, _, _):
        rig.run(PROMPT)
        rig.settle()
        taken = dict(near._blocks)
    again = MemoryTier(1 << 24)
    again._blocks.update(taken)
    with tiered(again, weights="other") as (rig, runner, _):
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)
        assert rig.sink.end_of(child).cached_tokens == 0


@pytest.mark.parametrize("place", range(6))
def test_corrupt_bytes_are_computed_again_and_never_asked_for_again(place: int) -> None:
    near = SlowTier()
    with tiered(near) as (rig, runner, _):
        rig.run(PROMPT)
        rig.forget()

        def spoil(at: int, payload: memoryview) -> None:
            if at == place:
                payload[3] ^= 0x40

        near.spoil = spoil
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)
        assert rig.sink.end_of(child).cached_tokens == 4 * place
        (level,) = rig.tiers.cascade.levels
        assert level.counts.refused == {"payload": 1}
        near.spoil = lambda at, payload: None
        rig.settle()
        assert near.inner.stats().blocks == 7
        rig.engine.clear_cache(below=False)
        again = rig.submit(PROMPT)
        rig.assert_right(runner, again)
        assert rig.sink.end_of(again).cached_tokens == 4 * place


def test_K1_abort_while_a_slow_tier_writes_leaves_its_blocks_alone() -> None:
    near = SlowTier()
    with tiered(near, total_blocks=8) as (rig, runner, mover):
        rig.run(PROMPT)
        rig.forget()
        near.gate.clear()
        near.pass_blocks = 2
        near.reading.clear()
        child = rig.submit(PROMPT)
        assert near.reading.wait(5.0)
        rig.engine.abort(child)
        assert rig.sink.end_of(child).finish == "abort"
        victim = rig.submit(tokens_of(5, 7), sampling(12))
        rig.assert_right(runner, victim)
        near.gate.set()
        rig.assert_right(runner, rig.submit(tokens_of(6, 9), sampling(12)))
        rig.assert_nothing_left()
        assert rig.tiers.loader.ends["cancelled"] == 1
        assert mover.scattered == []


def test_K2_a_source_that_never_answers_frees_everything_at_its_deadline() -> None:
    near = SlowTier()
    kv = KvConfig(check_one_in=0, staging_bytes=16 << 10, load_deadline_ms=20.0)
    with tiered(near, kv=kv) as (rig, runner, _):
        rig.run(PROMPT)
        rig.forget()
        near.gate.clear()
        free = rig.tiers.loader._staging.free
        for _ in range(50):
            child = rig.submit(PROMPT)
            rig.assert_right(runner, child)
            assert rig.sink.end_of(child).cached_tokens == 0
            rig.engine.clear_cache(below=False)
        near.gate.set()
        wait_until(lambda: rig.tiers.loader._staging.free == free)
        rig.assert_nothing_left()
        assert rig.tiers.loader.ends["expired"] > 25
        assert rig.tiers.loader.loaded_blocks == 0


def test_K2_a_late_block_is_thrown_away() -> None:
    near = SlowTier()
    kv = KvConfig(check_one_in=0, staging_bytes=16 << 10, load_deadline_ms=40.0)
    with tiered(near, kv=kv) as (rig, runner, mover):
        rig.run(PROMPT)
        rig.forget()
        near.gate.clear()
        near.deaf = True
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)
        near.gate.set()
        near.drain(5.0)
        wait_until(lambda: rig.tiers.loader._staging.free == rig.tiers.loader._staging.slots)
        assert mover.scattered == []
        rig.assert_nothing_left()


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.008, 0.012, 0.016, 0.02])
def test_K3_abort_deadline_and_arrival_race(gap_s: float) -> None:
    near = SlowTier()
    kv = KvConfig(check_one_in=0, staging_bytes=16 << 10, load_deadline_ms=10.0)
    with tiered(near, kv=kv) as (rig, runner, _):
        rig.run(PROMPT)
        rig.forget()
        children: list[ChildId] = []
        for turn in range(12):
            near.gate.clear()
            child = rig.submit(PROMPT, sampling(2 + turn % 3))
            children.append(child)
            near.gate.wait(gap_s)
            if turn % 2:
                rig.engine.abort(child)
                near.gate.set()
            else:
                near.gate.set()
                rig.engine.abort(child)
            assert rig.sink.end_of(child).finish in ("abort", "length")
            rig.engine.clear_cache(below=False)
        rig.assert_right(runner, rig.submit(PROMPT))
        rig.assert_nothing_left()


def test_a_tier_that_is_away_costs_nothing() -> None:
    near = SlowTier()
    with tiered(near) as (rig, runner, _):
        rig.run(PROMPT)
        rig.forget()
        near.state = Health.OPEN
        near.gate.clear()
        loads = sum(rig.tiers.loader.ends.values())
        rig.assert_right(runner, rig.submit(PROMPT))
        assert sum(rig.tiers.loader.ends.values()) == loads


def test_a_writer_that_hangs_drops_the_oldest_and_holds_nobody_up() -> None:
    near = SlowTier()
    with tiered(near, total_blocks=16) as (rig, runner, _):
        rig.tiers.outbound._near._max_items = 4
        near.put_gate.clear()
        for seed in range(6):
            rig.assert_right(runner, rig.submit(tokens_of(seed, 26)))
        assert rig.tiers.outbound.dropped_blocks[0] > 0
        near.put_gate.set()
        rig.settle()
        rig.assert_nothing_left()


def test_evicted_before_it_was_written_is_skipped_and_never_mixed_up() -> None:
    near = SlowTier()
    with tiered(near, total_blocks=8) as (rig, runner, _):
        near.put_gate.clear()
        prompts = [tokens_of(seed, 26) for seed in range(5)]
        for prompt in prompts:
            rig.assert_right(runner, rig.submit(prompt))
        near.put_gate.set()
        rig.settle()
        assert rig.tiers.outbound.skipped["evicted"] > 0
        for prompt in prompts:
            rig.assert_right(runner, rig.submit(prompt))


def test_a_sample_of_loads_is_computed_again_and_found_equal() -> None:
    kv = KvConfig(check_one_in=1, staging_bytes=16 << 10)
    with tiered(kv=kv) as (rig, runner, _):
        rig.run(PROMPT)
        rig.forget()
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)
        assert rig.sink.end_of(child).cached_tokens == 20
        rig.settle()
        assert (rig.tiers.spot.checked, rig.tiers.spot.mismatches) == (1, 0)


def test_K7_a_block_that_passes_every_sum_and_is_wrong_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = KvConfig(check_one_in=1, staging_bytes=16 << 10)
    with tiered(kv=kv) as (rig, runner, mover):
        gather = mover.gather

        def gather_wrong(block: int, into: memoryview) -> None:
            gather(block, into)
            if len(mover.gathered) == 6:
                turn(into)

        mover.gather = gather_wrong
        rig.run(PROMPT)
        rig.forget()
        rig.run(PROMPT)
        rig.settle()
        (level,) = rig.tiers.cascade.levels
        assert rig.tiers.spot.mismatches == 1
        assert level.counts.refused == {"recomputed": 1}
        assert not level.usable
        assert "kv_recompute_mismatch" in caplog.text
        rig.engine.clear_cache(below=False)
        again = rig.submit(PROMPT)
        rig.assert_right(runner, again)
        assert rig.sink.end_of(again).cached_tokens == 0


def turn(payload: memoryview) -> None:
    """What a writer with another layout would have written: values before keys."""
    half = 4 * BLOCK_TOKENS
    payload[: 2 * half] = bytes(payload[half : 2 * half]) + bytes(payload[:half])


def test_a_cleared_cache_is_cold_in_every_tier() -> None:
    near, far = SlowTier(), SlowTier("far", trusted=False)
    with tiered(near, far) as (rig, runner, _):
        rig.run(PROMPT)
        rig.run(PROMPT)
        rig.settle()
        rig.engine.clear_cache()
        assert near.stats().blocks == far.stats().blocks == 0
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)
        assert rig.sink.end_of(child).cached_tokens == 0


def test_while_the_pool_is_limited_the_device_stands_alone() -> None:
    near = SlowTier()
    with tiered(near) as (rig, runner, _):
        rig.engine.clear_cache(limit_blocks=60)
        rig.run(PROMPT)
        rig.settle()
        assert near.stats().blocks == 0
        rig.engine.clear_cache()
        rig.run(PROMPT)
        rig.settle()
        assert near.stats().blocks > 0
        child = rig.submit(PROMPT)
        rig.assert_right(runner, child)


def test_siblings_load_once() -> None:
    near = SlowTier()
    with tiered(near) as (rig, runner, mover):
        rig.run(PROMPT)
        rig.forget()
        near.gate.clear()
        children = [rig.submit(PROMPT, sampling(3 + n)) for n in range(4)]
        near.gate.set()
        rig.assert_right(runner, *children)
        assert len(mover.scattered) == 6


def test_blocks_come_nearer_while_their_request_queues() -> None:
    near = SlowTier()
    with tiered(near, max_running=1, total_blocks=64) as (rig, runner, mover):
        rig.run(PROMPT)
        rig.forget()
        near.reading.clear()
        first = rig.submit(tokens_of(5, 7), sampling(200, ignore_eos=True))
        rig.sink.wait(lambda: rig.sink.tokens(first))
        second = rig.submit(PROMPT)
        came: list[bool] = []

        def third_step(step: StepOutput) -> None:
            """The first one's answer goes on once the second one's blocks are being read."""
            came.append(near.reading.wait(5.0) if len(came) == 2 else True)

        rig.sink.on_output = third_step
        rig.assert_right(runner, first, second)
        assert came[2]
        assert len(came) > 100
        assert rig.sink.end_of(second).cached_tokens == 24
        assert len(mover.scattered) == 6
        rig.assert_nothing_left()


def test_the_engine_closes_in_the_middle_of_a_load() -> None:
    near = SlowTier()
    with tiered(near) as (rig, _, _):
        rig.run(PROMPT)
        rig.forget()
        near.gate.clear()
        child = rig.submit(PROMPT)
        assert near.reading.wait(5.0)
    assert rig.sink.end_of(child).finish == "error"
