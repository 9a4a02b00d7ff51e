"""A real model under the scheduler: no schedule changes a greedy token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from replica.runner.build import build_runner
from replica.sched.plan import Runner
from tests.replica.engine.schedules import Engine, Schedule
from tests.replica.sched.rig import tokens_of

GOLDEN = Path(__file__).parents[2] / "data" / "golden_smollm2.jsonl"
SURE_MARGIN = {"float32": 0.001, "bfloat16": 0.3}
"""Below this difference of the two best logprobs, either may be chosen; from there on runs part."""

SCHEDULES = {
    "alone": Schedule(max_running=1),
    "batched": Schedule(),
    "chunked": Schedule(max_step_tokens=24),
    "preempted": Schedule(total_blocks=20, horizon_tokens=1),
    "retracted": Schedule(retract_every_steps=5),
    "overlapped": Schedule(overlap=True, max_step_tokens=24),
}


def runner_of(path: Path, **settings: object) -> Runner:
    config = ReplicaConfig(**{"id": "r", "dtype": "float32", "threads": 1, **settings})
    return build_runner(load_card(path), config)


@pytest.fixture(scope="module")
def tiny_runner(tiny_model: Path) -> Iterator[Runner]:
    runner = runner_of(tiny_model, block_tokens=8, kv_blocks=128, kernel="torch")
    yield runner
    runner.close()


def prompts() -> list[tuple[int, ...]]:
    """Shared heads, odd lengths, block borders; ids that the tiny model has."""
    shared = [token % 250 for token in tokens_of(1, 33)]
    tails = [tuple(token % 250 for token in tokens_of(seed, seed * 3 % 17)) for seed in range(2, 8)]
    return [(*shared, *tail) for tail in tails] + [(5,), tuple(shared[:8]), tuple(shared[:16])]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "alone"])
def test_c11_no_schedule_changes_a_token(tiny_runner: Runner, name: str) -> None:
    wanted = [
        Engine(tiny_runner, SCHEDULES["alone"]).run([prompt], 24).tokens[0] for prompt in prompts()
    ]
    engine = Engine(tiny_runner, SCHEDULES[name])
    cold = engine.run(prompts(), 24)
    assert cold.tokens == wanted
    assert (cold.preemptions > 0) == (name in ("preempted", "retracted"))
    assert (cold.ahead > 0) == (name == "overlapped")
    warm = engine.run(prompts(), 24)
    assert warm.tokens == wanted
    assert sum(warm.cached_tokens) > 0


def test_c11_no_chunk_size_up_to_three_blocks_changes_a_token(tiny_runner: Runner) -> None:
    some = [prompts()[3]]
    wanted = Engine(tiny_runner, SCHEDULES["alone"]).run(some, 3).tokens
    for step_tokens in range(1, 3 * tiny_runner.block_tokens + 1):
        engine = Engine(tiny_runner, Schedule(max_running=1, max_step_tokens=step_tokens))
        for turn in ("cold", "warm"):
            assert engine.run(some, 3).tokens == wanted, (step_tokens, turn)


def test_c11_no_order_within_a_batch_changes_a_token(tiny_runner: Runner) -> None:
    wanted = Engine(tiny_runner, SCHEDULES["batched"]).run(prompts(), 16).tokens
    for seed in range(3):
        order = random.Random(seed).sample(range(len(wanted)), len(wanted))
        outcome = Engine(tiny_runner, SCHEDULES["batched"]).run([prompts()[i] for i in order], 16)
        assert outcome.tokens == [wanted[index] for index in order]


def golden(kinds: Sequence[str]) -> list[dict]:
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def assert_golden(line: dict, tokens: Sequence[int], dtype: str) -> None:
    """Equal up to the first step at which the record itself was undecided."""
    for step, token in enumerate(tokens):
        if line["margins"][step] < SURE_MARGIN[dtype] and token != line["output_ids"][step]:
            return
        assert token == line["output_ids"][step], f"prompt {line['id']}, step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SURE_MARGIN)
@pytest.mark.parametrize("name", ["alone", "batched", "chunked", "preempted", "overlapped"])
def test_golden_tokens_under_every_schedule(real_model: Path, name: str, dtype: str) -> None:
    kinds = ["shared-prefix", "chat", "unicode", "len33", "len64", "len65", "multi-turn"]
    lines = golden(kinds)[:: 6 if name == "alone" else 2]
    runner = runner_of(real_model, kv_blocks=512, threads=2, dtype=dtype)
    schedule = SCHEDULES[name]
    if name == "preempted":
        schedule = Schedule(total_blocks=32, horizon_tokens=1)
    engine = Engine(runner, schedule)
    for turn in range(2 if name == "batched" else 1):
        outcome = engine.run([line["prompt_ids"] for line in lines], 32)
        for line, tokens in zip(lines, outcome.tokens, strict=True):
            assert_golden(line, tokens, dtype)
        assert (outcome.preemptions > 0) == (name == "preempted")
        assert (outcome.ahead > 0) == (name == "overlapped")
        assert sum(outcome.cached_tokens) > 0 or (name == "alone" and not turn)
    runner.close()


@pytest.mark.slow
def test_golden_tokens_in_chunks_of_every_size_and_in_any_order(real_model: Path) -> None:
    runner = runner_of(real_model, kv_blocks=256, threads=2)
    (line,) = golden(["len65"])[:1]
    for step_tokens in range(1, 3 * runner.block_tokens + 1):
        engine = Engine(runner, Schedule(max_running=1, max_step_tokens=step_tokens))
        assert_golden(line, engine.run([line["prompt_ids"]], 3).tokens[0], "float32")
    lines = golden(["shared-prefix", "chat", "len33", "len64"])[::3]
    random.Random(1).shuffle(lines)
    outcome = Engine(runner, SCHEDULES["batched"]).run([each["prompt_ids"] for each in lines], 16)
    for each, tokens in zip(lines, outcome.tokens, strict=True):
        assert_golden(each, tokens, "float32")
    runner.close()
