"""From samples to figures, a table, JSON and a plot."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.bench.demo.run import PolicyRun

ROWS = (
    ("TTFT p50 ms", "ttft_p50_ms", "{:.0f}"),
    ("TTFT p90 ms", "ttft_p90_ms", "{:.0f}"),
    ("TTFT p99 ms", "ttft_p99_ms", "{:.0f}"),
    ("ITL p50 ms", "itl_p50_ms", "{:.0f}"),
    ("ITL p99 ms", "itl_p99_ms", "{:.0f}"),
    ("cached-token ratio", "cached_token_ratio", "{:.3f}"),
    ("requests", "requests", "{}"),
    ("errors", "errors", "{}"),
)


def percentile(values: list[float], rank: float) -> float:
    """Linear between ranks; nan for nothing."""
    return float(np.percentile(values, rank)) if values else math.nan


def figures(run: PolicyRun) -> dict[str, Any]:
    """The numbers of one policy; keys are the JSON's."""
    good = [sample for sample in run.samples if not sample.error]
    ttft = [sample.ttft_ms for sample in good]
    itl = [gap for sample in good for gap in sample.itl_ms]
    prompt = sum(sample.prompt_tokens for sample in good)
    return {
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p90_ms": percentile(ttft, 90),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_p50_ms": percentile(itl, 50),
        "itl_p99_ms": percentile(itl, 99),
        "cached_token_ratio": sum(sample.cached_tokens for sample in good) / max(1, prompt),
        "cached_token_ceiling": run.ceiling_tokens / max(1, prompt),
        "requests": len(run.samples),
        "requests_per_replica": dict(sorted(Counter(s.replica for s in run.samples).items())),
        "errors": len(run.samples) - len(good),
        "error_kinds": dict(Counter(sample.error for sample in run.samples if sample.error)),
        "wall_s": run.wall_s,
    }


def summary(runs: list[PolicyRun], settings: dict[str, Any]) -> dict[str, Any]:
    """What goes to the JSON file. The gain is the first policy's TTFT p50 over the last one's."""
    policies = {run.policy: figures(run) for run in runs}
    first, last = policies[runs[0].policy], policies[runs[-1].policy]
    return {
        "policies": policies,
        "cached_token_ceiling": last["cached_token_ceiling"],
        "ttft_p50_gain": first["ttft_p50_ms"] / last["ttft_p50_ms"],
        "settings": settings,
    }


def _better(gain: float) -> str:
    """A ratio of times in words."""
    return f"{gain:.1f}x better" if gain >= 1 else f"{1 / gain:.1f}x worse" if gain else "unknown"


def print_table(result: dict[str, Any], console: Console) -> None:
    """The table a person reads."""
    table = Table(title="the same load under each policy")
    table.add_column("")
    for policy in result["policies"]:
        table.add_column(policy, justify="right")
    for title, key, form in ROWS:
        table.add_row(title, *(form.format(of[key]) for of in result["policies"].values()))
    table.add_row(
        "requests per replica",
        *(
            " ".join(f"{name}:{count}" for name, count in of["requests_per_replica"].items())
            for of in result["policies"].values()
        ),
    )
    console.print(table)
    console.print(
        f"TTFT p50 is {_better(result['ttft_p50_gain'])}; the most that could be cached:"
        f" {result['cached_token_ceiling']:.3f} of the prompt tokens"
    )


def plot(runs: list[PolicyRun], result: dict[str, Any], path: Path) -> None:
    """TTFT distribution and cached tokens, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colors = [f"C{index}" for index in range(len(runs))]
    for run, color in zip(runs, colors, strict=True):
        ttft = sorted(sample.ttft_ms for sample in run.samples if not sample.error)
        share = [(rank + 1) / len(ttft) for rank in range(len(ttft))]
        left.step(ttft, share, where="post", label=run.policy, color=color)
    left.set(
        xscale="log", xlabel="TTFT, ms", ylabel="share of requests", title="time to first token"
    )
    left.grid(alpha=0.3)
    left.legend()
    names = [run.policy for run in runs]
    right.bar(
        names,
        [result["policies"][name]["cached_token_ratio"] for name in names],
        width=0.5,
        color=colors,
    )
    right.axhline(result["cached_token_ceiling"], color="black", linestyle="--", linewidth=1)
    right.set(
        ylim=(0, 1),
        ylabel="share of prompt tokens",
        title="found cached (dashed: the most possible)",
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
