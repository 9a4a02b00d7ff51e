"""The learnt cost model: sane without data, right with it, calm about outliers."""

from __future__ import annotations

import random

import pytest

from replica.sched.plan import ChildId, ExecutionPlan, PlanId, PlanRow
from replica.sched.timing import Timing


def plan_of(*rows: tuple[int, int]) -> ExecutionPlan:
    """Rows of (start, count)."""
    return ExecutionPlan(
        plan_id=PlanId(1),
        rows=tuple(
            PlanRow(
                child=ChildId(index),
                incarnation=0,
                start=start,
                token_ids=(0,) * count,
                block_ids=(),
                sample=None,
            )
            for index, (start, count) in enumerate(rows)
        ),
    )


def decode_ms(rows: int, context: int) -> float:
    return 30.0 + 2.0 * rows + 0.001 * context


def prefill_ms(start: int, count: int) -> float:
    return 10.0 + 0.8 * count + 2e-5 * (start * count + count * (count + 1) / 2)


def trained(steps: int, noise: float = 0.02) -> Timing:
    """A model that has seen decode, prefill and mixed steps of one machine."""
    rng, timing = random.Random(1), Timing()
    for _ in range(steps):
        rows = [(rng.randrange(4_000), 1) for _ in range(rng.randint(1, 16))]
        blur = 1.0 + rng.uniform(-noise, noise)
        context = sum(start for start, _ in rows)
        timing.observe(plan_of(*rows), decode_ms(len(rows), context) * blur)
        start, count = rng.randrange(4_000), rng.randint(16, 512)
        if rng.random() < 0.5:
            timing.observe(plan_of((start, count)), prefill_ms(start, count) * blur)
        else:
            share = 2.0 * len(rows) + 0.001 * context
            timing.observe(
                plan_of((start, count), *rows), (prefill_ms(start, count) + share) * blur
            )
    return timing


def test_without_data_it_is_sane_and_says_that_it_knows_nothing() -> None:
    timing = Timing()
    assert timing.prefill.confidence == timing.decode.confidence == 0.0
    assert timing.prefill.predict_ms(0, 500) > timing.prefill.predict_ms(400, 100) > 0.0
    assert timing.decode.predict_ms(8, 1_000) >= timing.decode.predict_ms(1, 100) > 0.0
    assert timing.step_ms == 0.0


def test_it_learns_its_machine_from_mixed_steps() -> None:
    timing = trained(300)
    for start, count in ((0, 500), (2_000, 256), (1_000, 64)):
        wanted = prefill_ms(start, count)
        assert timing.prefill.predict_ms(start, count) == pytest.approx(wanted, rel=0.15)
    for rows, context in ((1, 500), (8, 10_000), (16, 30_000)):
        wanted = decode_ms(rows, context)
        assert timing.decode.predict_ms(rows, context) == pytest.approx(wanted, rel=0.15)
    assert timing.prefill.confidence > 0.7
    assert timing.decode.confidence > 0.7


def test_an_outlier_moves_little() -> None:
    timing = trained(100)
    before = timing.decode.predict_ms(4, 4_000)
    timing.observe(plan_of(*[(1_000, 1)] * 4), 60_000.0)
    assert timing.decode.predict_ms(4, 4_000) == pytest.approx(before, rel=0.2)


def test_it_follows_a_machine_that_became_slower() -> None:
    timing = trained(100)
    for _ in range(400):
        timing.observe(plan_of(*[(1_000, 1)] * 4), 90.0)
        timing.observe(plan_of(*[(500, 1)] * 2), 80.0)
    assert timing.decode.predict_ms(4, 4_000) == pytest.approx(90.0, rel=0.1)


def test_one_kind_of_step_for_ever_does_not_blow_up() -> None:
    timing = Timing()
    for _ in range(5_000):
        timing.observe(plan_of((1_000, 1)), 50.0)
    assert timing.decode.predict_ms(1, 1_000) == pytest.approx(50.0, rel=0.05)
    assert 0.0 < timing.decode.predict_ms(16, 16_000) < 10_000.0


@pytest.mark.parametrize("seed", range(8))
def test_noisy_batches_of_changing_size_never_blow_up(seed: int) -> None:
    """Noise pushes single weights below zero; what holds them there must not drive the others."""
    rng, timing = random.Random(seed), Timing()
    for step in range(4_000):
        size = 1 + (step // 50) % 20 if rng.random() < 0.9 else rng.randint(1, 32)
        rows = [(rng.randrange(60, 600), 1) for _ in range(size)]
        pause = rng.choice((1.0, 1.0, 1.0, 3.0, 10.0))
        timing.observe(plan_of(*rows), (2.0 + 0.2 * size) * pause)
        if rng.random() < 0.05:
            count = rng.randint(16, 512)
            timing.observe(plan_of((0, count), *rows), (5.0 + 0.03 * count) * pause)
    for rows_now, context in ((1, 100), (16, 4_000), (32, 20_000)):
        assert 0.5 < timing.decode.predict_ms(rows_now, context) < 300.0
    assert 1.0 < timing.prefill.predict_ms(0, 500) < 1_000.0
