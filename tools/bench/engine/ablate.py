"""What each part of the engine brings: the default beside one switch at a time, in turn, on one
workload. Every switch is a setting of a replica.
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
from tools.bench.engine.workload import Call, Mix, Replay, calls

POOL_TOKENS = 8_192
DEFAULT = "default"
REFERENCE = "reference"
WHOLE = {"max_step_tokens": 8_192, "itl_target_ms": 0.0}

SWITCHES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "static_batching": {"batching": "static"},
    "no_chunking": WHOLE,
    "fixed_chunks": {"itl_target_ms": 0.0},
    "no_prefix_cache": {"prefix_cache": False},
    "overlap": {"overlap": True},
    "lru_eviction": {"eviction": "lru"},
    "block_tokens_64": {"block_tokens": 64},
}
"""By name, what differs from the default."""

EAGER: dict[str, Any] = {"kernel": "torch", "prefix_cache": False, **WHOLE}
"""The reference: plain torch operators one by one, nothing cached, prompts in one piece."""

COLUMNS = {
    "output_tokens_per_s": ("tokens/s", ".1f"),
    "vs_default": ("vs default", ".2f"),
    "output_tokens_per_cpu_s": ("per CPU s", ".1f"),
    "ttft_p50_ms": ("TTFT p50", ".0f"),
    "ttft_p99_ms": ("p99", ".0f"),
    "itl_p50_ms": ("ITL p50", ".0f"),
    "itl_p99_ms": ("p99", ".0f"),
    "cached_ratio": ("cached", ".2f"),
    "preemptions": ("preempted", ".0f"),
}

Say = Callable[[str], None]


def measure(
    card: ModelCard,
    settings: Mapping[str, Any],
    mix: Mix,
    rounds: int,
    reference: bool,
    say: Say,
) -> dict[str, dict[str, float]]:
    """By row: medians over the rounds; `vs_default` is that of the ratios of tokens/s in a round.

    `settings`: of ReplicaConfig, for every row.
    """
    rows = SWITCHES | ({REFERENCE: EAGER} if reference else {})
    todo = calls(mix, card.shape.vocab)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for number in range(rounds):
        for name, switch in rows.items():
            say(f"round {number + 1} of {rounds}: {name}")
            outcome = _run(card, {**settings, **switch}, todo, mix.users)
            default = found[DEFAULT][number] if name != DEFAULT else outcome
            rate = "output_tokens_per_s"
            found[name].append({**outcome, "vs_default": outcome[rate] / default[rate]})
    return {name: _medians(outcomes) for name, outcomes in found.items()}


def show(found: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """One row a switch."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for heading, _ in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in found.items():
        table.add_row(name, *(format(figures[key], form) for key, (_, form) in COLUMNS.items()))
    console.print(table)


def _run(
    card: ModelCard, settings: Mapping[str, Any], todo: list[Call], users: int
) -> dict[str, float]:
    block_tokens = settings.get("block_tokens", ReplicaConfig(id="bench").block_tokens)
    config = ReplicaConfig(
        **{
            "id": "bench",
            "kv_blocks": POOL_TOKENS // block_tokens,
            "max_running": users,
            **settings,
        }
    )
    replay = Replay(card, config)
    try:
        warm = [Call(tuple(range(64)), 4)]
        replay.run(warm, 1)
        return asdict(replay.run(todo, users))
    finally:
        replay.close()


def _medians(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: median(each[key] for each in outcomes) for key in outcomes[0]}
