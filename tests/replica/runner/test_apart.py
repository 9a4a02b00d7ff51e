"""The torch path on a device that is not the host: no tensor strays, and the numbers are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from events.request import SamplingParams
from kvstore.layout import Layout
from replica.runner.build import build_runner, kv_layout
from replica.runner.runner import ModelRunner
from replica.sched.plan import (
    ChildId,
    ExecutionPlan,
    PlanId,
    PlanRow,
    RowResult,
    SampleSpec,
    Scoring,
)
from tests.fakes.apart import apart_device
from tests.replica.runner.golden import check, recordings, run_side_by_side

HOST = ReplicaConfig(id="r0", kernel="torch", dtype="float32", kv_blocks=64)
EVERYTHING = SamplingParams(
    max_tokens=4,
    seed=1,
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias={3: 1.0},
    logprobs=3,
    bad_words=((1, 2),),
)
GREEDY = SamplingParams(max_tokens=4, seed=1, temperature=0.0)


def row(
    child: int, start: int, tokens: tuple[int, ...], params: SamplingParams | None = None
) -> PlanRow:
    spec = None
    if params is not None:
        spec = SampleSpec(params, 1, start + len(tokens), (1, 2, 3), (5, 1), suppress_ids=(7,))
    blocks = tuple(range(8 * child, 8 * child + 8))
    return PlanRow(ChildId(child), 0, start, tokens, blocks, spec)


def outcomes(runner: ModelRunner) -> list[RowResult]:
    """A first chunk; then decodes, a second chunk and a scored prompt in one step."""
    first = [row(0, 0, tuple(range(20))), row(1, 0, (1,) * 16)]
    scored = replace(row(2, 0, (4, 5, 6, 7), GREEDY), scoring=Scoring((5, 6, 7), 2))
    mixed = [row(0, 20, (5,), EVERYTHING), row(1, 16, (1,) * 24, GREEDY), scored]
    plans = [ExecutionPlan(PlanId(n), tuple(rows)) for n, rows in enumerate((first, mixed))]
    return [result for plan in plans for result in runner.execute(plan).rows]


def numbers(result: RowResult) -> list[float]:
    reports = [*result.scores, *([result.logprob] if result.logprob else [])]
    return [value for one in reports for value in (one.logprob, *(each[1] for each in one.top))]


def test_every_kind_of_row_gives_what_it_gives_on_the_host(tiny_model: Path) -> None:
    card = load_card(tiny_model)
    expected = outcomes(build_runner(card, HOST))
    with apart_device() as device:
        found = outcomes(build_runner(card, structs.replace(HOST, device=device)))
    assert [one.error for one in found] == [None] * len(found)
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-4)
    assert len(found[-1].scores) == 3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_recordings(real_model: Path, dtype: str) -> None:
    chosen = recordings([18, 53])
    config = structs.replace(HOST, dtype=dtype)
    with apart_device() as device:
        runner = build_runner(load_card(real_model), structs.replace(config, device=device))
        outputs = run_side_by_side(runner, chosen, chunk=100, output_tokens=6)
    check(outputs, chosen, dtype)


def test_a_block_leaves_the_device_and_comes_back(tiny_model: Path) -> None:
    card = load_card(tiny_model)
    with apart_device() as device:
        config = structs.replace(HOST, device=device)
        runner = build_runner(card, config)
        runner.execute(ExecutionPlan(PlanId(0), (row(0, 0, tuple(range(16))),)))
        layout = Layout.of(kv_layout(card, config))
        mover = runner.mover(layout)
        sent, returned = bytearray(layout.payload_bytes), bytearray(layout.payload_bytes)
        mover.gather(0, memoryview(sent))
        mover.scatter(memoryview(sent), 9)
        mover.gather(9, memoryview(returned))
    assert any(sent)
    assert sent == returned


def test_the_device_notices_what_strays() -> None:
    with apart_device() as device:
        there, here = torch.ones(2, device=device), torch.ones(2)
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
