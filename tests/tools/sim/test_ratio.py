"""The worksheet: arithmetic that can be checked by hand, and its borders."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from events.load import DecodeFit, PrefillFit
from tools.sim.call import Call, Trace
from tools.sim.profiles import DEVICES
from tools.sim.ratio import BUSY, Work, best, ratios, seats_of, work_of

DEVICE = dataclasses.replace(
    DEVICES["a10g-7b"],
    prefill=PrefillFit(a=0.0, b=0.1, c=0.0, confidence=1.0),
    decode=DecodeFit(base=10.0, per_row=0.5, per_context=0.0, confidence=1.0),
    max_running=64,
    kv_bytes_per_token=1_000,
)


def call(prompt: int, output: int) -> Call:
    return Call(0.0, "t", np.arange(1), prompt, output)


def trace(*calls: Call) -> Trace:
    return Trace("test", 16, calls)


def work(**changes: float) -> Work:
    base = Work(
        prefill_ms=100.0, answer_ms=50.0, both_ms=150.0, moved_bytes=1e6, seats=8, long_share=0.5
    )
    return dataclasses.replace(base, **changes)


def test_what_a_request_takes_of_each_part() -> None:
    of = trace(call(4_000, 20), call(100, 200))
    found = work_of(of, DEVICE, 1 << 20, slo_tpot_ms=30.0, min_tokens=256)
    assert found.seats == 40
    token_ms = (10.0 + 0.5 * 40) / 40
    assert found.prefill_ms == pytest.approx(400.0 / 2)
    assert found.answer_ms == pytest.approx(token_ms * 110 + 10.0 / 2)
    assert found.both_ms == pytest.approx(found.prefill_ms + found.answer_ms)
    assert found.moved_bytes == pytest.approx(4_000 * 1_000 / 2)
    assert found.long_share == 0.5


@pytest.mark.parametrize(
    ("slo_ms", "kv_tokens", "seats"),
    [(30.0, 1 << 20, 40), (1e9, 1 << 20, 64), (1e9, 1_000, 10), (1.0, 1 << 20, 1), (30.0, 10, 1)],
)
def test_seats_are_bounded_by_objective_memory_and_device(
    slo_ms: float, kv_tokens: int, seats: int
) -> None:
    assert seats_of(DEVICE, 100.0, kv_tokens, slo_ms) == seats


def test_each_part_limits_its_side() -> None:
    found = {ratio.name: ratio for ratio in ratios(work(), 6, gbytes_per_s=10.0)}
    assert found["0:6"].rate_per_s == pytest.approx(1e3 * BUSY * 6 / 150.0)
    assert found["2:4"].limit == "prefill"
    assert found["5:1"].limit == "decode"
    assert found["4:2"].rate_per_s == pytest.approx(1e3 * BUSY * 4 / 100.0)
    slow = {ratio.name: ratio for ratio in ratios(work(), 6, gbytes_per_s=0.001)}
    assert slow["4:2"].limit == "transfer"
    assert slow["4:2"].rate_per_s < found["4:2"].rate_per_s


def test_headroom_prefers_a_ratio_that_survives_a_loss() -> None:
    assert best(ratios(work(), 3, 10.0, away=0)).name == "2:1"
    assert best(ratios(work(), 3, 10.0, away=1)).name == "1:2"
    assert best(ratios(work(), 2, 10.0, away=1)).name == "1:1"


def test_with_nobody_left_to_compute_those_that_answer_do() -> None:
    (_, one) = ratios(work(), 2, 10.0)
    assert one.rate_less_per_s == 0.0
    (ratio,) = [r for r in ratios(work(), 3, 10.0) if r.name == "1:2"]
    assert ratio.rate_less_per_s == pytest.approx(
        min(1e3 * BUSY * 2 / 150.0, 1e3 * BUSY * 1 / 50.0, 1e3 * BUSY / 100.0)
    )
