"""What each part of the engine brings: the default beside one switch at a time, in turn, each on
the load on which it matters (see trials). Every switch is a setting of a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from configs.model.card import ModelCard
from configs.schema import ReplicaConfig
from tools.bench.engine.trials import Trial
from tools.bench.engine.workload import Call, Replay, calls

Say = Callable[[str], None]


def measure(
    card: ModelCard, settings: Mapping[str, Any], trials: Mapping[str, Trial], rounds: int, say: Say
) -> dict[str, dict[str, Any]]:
    """By trial: its `figure` with the default and with the switch, medians over the rounds;
    `ratio`, the median of the rounds' ratios; `noise`, how far the default's own rounds differ, as
    a share; and all other figures of both. `settings`: of ReplicaConfig, for every run."""
    found = {}
    for name, trial in trials.items():
        todo = calls(trial.mix, card.shape.vocab)
        sides: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for number in range(rounds):
            say(f"{name}: round {number + 1} of {rounds}")
            for outcomes, switch in zip(sides, ({}, trial.switch), strict=True):
                outcomes.append(_run(card, {**settings, **switch}, trial, todo))
        found[name] = _compared(trial, *sides)
    return found


def show(found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """One row a switch."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("switch", "figure", "default", "switched", "ratio", "noise", "so"):
        numeric = heading in ("default", "switched", "ratio", "noise")
        # What is read by name stays whole on a narrow screen; what explains it goes on below.
        whole = numeric or heading == "switch"
        justify = "right" if numeric else "left"
        table.add_column(heading, justify=justify, no_wrap=whole, overflow="fold")
    for name, row in found.items():
        numbers = [format(row[key], ".4g") for key in ("default", "switched")]
        shares = [format(row["ratio"], ".2f"), format(row["noise"], ".0%")]
        table.add_row(name, row["figure"], *numbers, *shares, row["effect"])
    console.print(table)


def _compared(
    trial: Trial, plain: Sequence[Mapping[str, float]], switched: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    figure = trial.figure
    before, after = [each[figure] for each in plain], [each[figure] for each in switched]
    ratio = median(b / max(a, 1e-9) for a, b in zip(before, after, strict=True))
    noise = max(before) / max(min(before), 1e-9) - 1.0
    return {
        "figure": figure,
        "default": median(before),
        "switched": median(after),
        "ratio": ratio,
        "noise": noise,
        "effect": _effect(ratio, noise, trial.better),
        "all": {"default": _medians(plain), "switched": _medians(switched)},
    }


def _effect(ratio: float, noise: float, better: bool) -> str:
    """In words: only what is more than the default differs from itself."""
    if max(ratio, 1.0 / max(ratio, 1e-9)) - 1.0 <= noise or ratio == 1.0:
        return "none seen"
    return "the switch is better" if (ratio > 1.0) == better else "the default is better"


def _run(
    card: ModelCard, settings: Mapping[str, Any], trial: Trial, todo: list[Call]
) -> dict[str, float]:
    block_tokens = settings.get("block_tokens", ReplicaConfig(id="bench").block_tokens)
    config = ReplicaConfig(
        **{
            "id": "bench",
            "kv_blocks": trial.pool_tokens // block_tokens,
            "max_running": trial.mix.users,
            **settings,
        }
    )
    replay = Replay(card, config)
    try:
        replay.run([Call(tuple(range(64)), 4)], 1)
        return asdict(replay.run(todo, trial.mix.users))
    finally:
        replay.close()


def _medians(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: median(each[key] for each in outcomes) for key in outcomes[0]}
