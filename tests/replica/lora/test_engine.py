"""Adapters under the scheduler, with a real runner: no schedule changes a greedy token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.model.adapter import adapter_card
from configs.model.card import load_card
from configs.schema import ReplicaConfig
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from tests.fakes.adapters import write_adapter
from tests.replica.engine.schedules import Engine, Schedule
from tests.replica.lora.merged import merged_runner
from tests.replica.sched.rig import tokens_of

WANTED = 10
NAMES = ("", "a", "b", "", "c", "a", "b", "a")
SCHEDULES = {
    "batched": Schedule(),
    "three in memory": Schedule(max_adapters=3),
    "chunked": Schedule(max_step_tokens=10),
    "preempted": Schedule(total_blocks=12, horizon_tokens=1, max_adapters=3),
    "retracted": Schedule(retract_every_steps=5),
    "overlapped": Schedule(overlap=True, max_step_tokens=24),
}


@dataclass
class Served:
    """A runner with adapters, and what merged weights put out for each of its requests."""

    runner: ModelRunner
    wanted: list[list[int]]


def prompts() -> list[tuple[int, ...]]:
    """One head for all, so that only the adapter tells them apart in the cache."""
    head = tuple(token % 250 for token in tokens_of(1, 20))
    return [(*head, *(token % 250 for token in tokens_of(at % 3, at % 3))) for at in range(8)]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    card, folder = load_card(tiny_model), tmp_path_factory.mktemp("adapters")
    paths = {
        name: write_adapter(folder / name, card.shape, seed=seed, rank=4 * seed)
        for seed, name in enumerate(("a", "b", "c"), 1)
    }
    config = ReplicaConfig(id="r", dtype="float32", block_tokens=8, kv_blocks=128)
    cards = {name: adapter_card(name, path, card.shape) for name, path in paths.items()}
    runners = {name: merged_runner(card, path) for name, path in paths.items()}
    runners[""] = build_runner(card, config)
    alone = {name: Engine(runner, Schedule(max_running=1)) for name, runner in runners.items()}
    wanted = [
        alone[name].run([prompt], WANTED).tokens[0]
        for name, prompt in zip(NAMES, prompts(), strict=True)
    ]
    runner = build_runner(card, config, cards)
    yield Served(runner, wanted)
    assert runner.adapters is not None
    runner.adapters.close()
    runner.close()


def test_adapters_change_what_is_said(served: Served) -> None:
    assert len({tuple(tokens) for tokens in served.wanted}) >= 5


@pytest.mark.parametrize("name", SCHEDULES)
def test_c11_every_schedule_gives_the_tokens_of_merged_weights(served: Served, name: str) -> None:
    engine = Engine(served.runner, SCHEDULES[name], served.runner.adapters)
    if name == "preempted":  # adapters in memory, and answers that were short so far
        engine.run(prompts(), 1, NAMES)
    cold = engine.run(prompts(), WANTED, NAMES)
    assert cold.tokens == served.wanted
    assert (cold.preemptions > 0) == (name in ("preempted", "retracted"))
    assert (cold.ahead > 0) == (name == "overlapped")
    warm = engine.run(prompts(), WANTED, NAMES)
    assert warm.tokens == served.wanted
    assert sum(warm.cached_tokens) > 0
    evictions = engine.scheduler.adapters.state().evictions
    assert (evictions > 0) == (SCHEDULES[name].max_adapters != 3)
