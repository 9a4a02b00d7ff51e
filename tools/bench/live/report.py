"""The figures as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench.live.play import Played

ROWS = (
    ("TTFT mean ms", "ttft_mean_ms", ".0f"),
    ("TTFT p50 ms", "ttft_p50_ms", ".0f"),
    ("TTFT p90 ms", "ttft_p90_ms", ".0f"),
    ("TTFT p99 ms", "ttft_p99_ms", ".0f"),
    ("ITL mean ms", "itl_mean_ms", ".1f"),
    ("E2E mean ms", "e2e_mean_ms", ".0f"),
    ("cached-token ratio", "cached_token_ratio", ".3f"),
)
LATE_MS = 50.0


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Values with their 95 % intervals."""
    targets, of = result["targets"], result["settings"]
    table = Table(title=f"{of['trace']}: {of['requests']} requests x {of['rounds']} rounds")
    table.add_column("")
    for name in targets:
        table.add_column(name, justify="right")
    for title, key, form in (*ROWS, (f"goodput ({of['slo']})", "slo_share", ".3f")):
        table.add_row(title, *(cell(found.get(key), form) for found in targets.values()))
    over = [found.get("over_first", {}).get("ttft_mean_ms") for found in targets.values()]
    table.add_row("TTFT mean over the first", *(cell(ratio, ".2f") for ratio in over))
    table.add_row("errors", *(str(sum(f["errors"].values())) for f in targets.values()))
    console.print(table)
    _print_remarks(result, console)


def _print_remarks(result: Mapping[str, Any], console: Console) -> None:
    of = result["settings"]
    console.print(
        f"{of['requests_per_s']:.2f} requests/s, {of['utilisation']:.2f} of what the replicas "
        "could answer one by one without any cache; in brackets 95 % intervals",
        highlight=False,
    )
    for name, found in result["targets"].items():
        if found["errors"]:
            console.print(f"{name} failed: {found['errors']}")
        if found["sent_late_p99_ms"] > LATE_MS:
            late_ms = found["sent_late_p99_ms"]
            console.print(f"{name}: the client itself was late (p99 {late_ms:.0f} ms)")


def cell(figure: Mapping[str, float | None] | None, form: str) -> str:
    """A value and its interval, as far as there are some."""
    if figure is None or figure["value"] is None:
        return "-"
    if figure["low"] is None or figure["high"] is None:
        return format(figure["value"], form)
    low, high = format(figure["low"], form), format(figure["high"], form)
    return f"{format(figure['value'], form)} [{low}, {high}]"


def draw(rounds: Mapping[str, Sequence[Played]], file: Path) -> None:
    """Distributions of TTFT and of the gaps between tokens, all rounds together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, of in rounds.items():
        good = [s for played in of for s in played.samples if not s.error]
        _curve(left, name, [sample.ttft_ms for sample in good])
        _curve(right, name, [gap for sample in good for gap in sample.itl_ms])
    for axes, label in ((left, "TTFT, ms"), (right, "ITL, ms")):
        axes.set(xscale="log", xlabel=label, ylabel="share")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _curve(axes: Any, name: str, values: list[float]) -> None:
    values = sorted(value for value in values if value > 0)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.step(values, shares, where="post", label=name)
