"""The recorded greedy continuations, and what it means to agree with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replica.sched.plan import Runner
from tests.replica.runner.driver import Driver

GOLDEN = Path(__file__).parents[2] / "data" / "golden_smollm2.jsonl"
OUTPUT_TOKENS = 64
NEAR_TIE = {"float32": 0.001, "bfloat16": 0.3}
"""A run may part from the recording only at a step whose top-2 margin is below this."""


@dataclass(frozen=True)
class Recording:
    """`margins` holds, for each step, by how much the best logit led."""

    id: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    margins: list[float]


def recordings(ids: Sequence[int] | None = None) -> list[Recording]:
    """All of them, or those with these ids, in the file's order."""
    found = []
    for line in GOLDEN.read_text().splitlines():
        row = json.loads(line)
        if ids is None or row["id"] in ids:
            fields = {name: row[name] for name in Recording.__dataclass_fields__}
            found.append(Recording(**fields))
    return found


def parting(output: Sequence[int], recording: Recording) -> int | None:
    """The first step at which the output differs, or None."""
    steps = zip(output, recording.output_ids, strict=False)
    return next((step for step, (ours, theirs) in enumerate(steps) if ours != theirs), None)


def run_side_by_side(
    runner: Runner, chosen: Sequence[Recording], chunk: int, output_tokens: int = OUTPUT_TOKENS
) -> list[list[int]]:
    """Greedy outputs, all prompts in one batch: chunked prefill, then decode."""
    driver = Driver(runner, chunk)
    children = [driver.child(each.prompt_ids, output_tokens) for each in chosen]
    driver.generate(children, output_tokens)
    return [child.output for child in children]


def check(outputs: Sequence[Sequence[int]], chosen: Sequence[Recording], dtype: str) -> None:
    """Every output equals its recording, or parts from it at a near-tie."""
    for output, recording in zip(outputs, chosen, strict=True):
        step = parting(output, recording)
        if step is not None:
            margin = recording.margins[step]
            assert margin < NEAR_TIE[dtype], f"prompt {recording.id} parts at step {step}: {margin}"
