"""Greedy output of the default model, through the real runner, against the recording."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from events.request import SamplingParams
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from tests.replica.runner.driver import Driver
from tests.replica.runner.golden import Recording, check, recordings, run_side_by_side

FEW = [0, 6, 18, 30, 42, 48, 50, 53, 61]
DTYPES = ["float32", "bfloat16"]

Build = Callable[[str, str], ModelRunner]


@pytest.fixture(scope="module")
def build(real_model: Path) -> Build:
    """A runner for a dtype and a kernel setting; each is made once."""
    card = load_card(real_model)

    @cache
    def make(dtype: str, kernel: str) -> ModelRunner:
        config = ReplicaConfig(id="r0", dtype=dtype, kernel=kernel, kv_blocks=1024)
        return build_runner(card, config)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
def test_few(build: Build, dtype: str) -> None:
    chosen = recordings(FEW)
    outputs = run_side_by_side(build(dtype, "auto"), chosen, chunk=100, output_tokens=32)
    check(outputs, chosen, dtype)


def test_plain_torch_agrees(build: Build) -> None:
    chosen = recordings([18, 53])
    outputs = run_side_by_side(build("float32", "torch"), chosen, chunk=7, output_tokens=12)
    check(outputs, chosen, "float32")


def test_logprobs_are_the_model_s(build: Build) -> None:
    (recording,) = recordings([53])
    driver = Driver(build("float32", "auto"))
    params = SamplingParams(max_tokens=8, seed=0, temperature=0.0, logprobs=2)
    child = driver.child(recording.prompt_ids, 8, params)
    driver.generate([child], 8)
    for step, result in enumerate(child.results):
        assert result.logprob is not None
        assert result.logprob.token_id == result.token_id == recording.output_ids[step]
        assert result.logprob.logprob == pytest.approx(recording.logprobs[step], abs=2e-3)
        (best, first), (_, second) = result.logprob.top
        assert best == result.token_id
        assert first - second == pytest.approx(recording.margins[step], abs=2e-3)


def check_batches(runner: ModelRunner, chosen: list[Recording], chunk: int, dtype: str) -> None:
    for first in range(0, len(chosen), 16):
        some = chosen[first : first + 16]
        check(run_side_by_side(runner, some, chunk), some, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_with_4_bit_weights(real_model: Path, dtype: str) -> None:
    """Chunks that are many rows and few, several in a batch and one alone."""
    config = ReplicaConfig(id="r0", dtype=dtype, weights="q4", kv_blocks=256)
    kept = build_runner(load_card(real_model), config)
    for ids, chunk in (([18, 53], 33), ([53], 7)):
        chosen = recordings(ids)
        check(run_side_by_side(kept, chosen, chunk, output_tokens=12), chosen, dtype)


@pytest.mark.slow
def test_all_with_4_bit_weights(real_model: Path) -> None:
    """In float32 they are those of the numbers to the bit; see test_q4."""
    config = ReplicaConfig(id="r0", dtype="bfloat16", weights="q4", kv_blocks=1024)
    check_batches(build_runner(load_card(real_model), config), recordings(), 100, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all(build: Build, dtype: str, chunk: int) -> None:
    check_batches(build(dtype, "auto"), recordings(), chunk, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_third_in_plain_torch(build: Build, dtype: str) -> None:
    check_batches(build(dtype, "torch"), recordings()[::3], 512, dtype)
