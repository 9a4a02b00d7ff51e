"""Figures as a table: one row a policy."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tools.sim.settings import CLAIRVOYANT, SOUGHT

COLUMNS = {
    "cached_token_ratio": ("cached", ".3f"),
    "ttft_mean_s": ("TTFT", ".2f"),
    "ttft_p50_s": ("p50", ".2f"),
    "ttft_p90_s": ("p90", ".2f"),
    "ttft_p99_s": ("p99", ".2f"),
    "e2e_mean_s": ("E2E", ".2f"),
    "e2e_p50_s": ("p50", ".2f"),
    "e2e_p90_s": ("p90", ".2f"),
    "e2e_p99_s": ("p99", ".2f"),
    "itl_p99_ms": ("ITL p99", ".0f"),
    "slo_share": ("in SLO", ".3f"),
    "goodput_per_s": ("good/s", ".2f"),
    "max_over_mean_load": ("load", ".2f"),
    "jain_tenant_ttft": ("fair", ".2f"),
    "moved_gbytes": ("GB moved", ".0f"),
    "capacity_load": ("capacity", ".2f"),
}
"""Figure to heading and form: times in s, gaps in ms, load as the largest over the mean, fairness
as Jain's index of the tenants' mean TTFT."""


def columns(
    policies: dict[str, dict[str, Any]], known: dict[str, tuple[str, str]] = COLUMNS
) -> dict[str, tuple[str, str]]:
    """Those of the known ones that there are figures for."""
    told = {figure for figures in policies.values() for figure in figures}
    return {figure: form for figure, form in known.items() if figure in told}


def cells(name: str, figures: dict[str, Any], shown: dict[str, tuple[str, str]]) -> list[str]:
    """One policy's row; the bound stands in brackets, out of the comparison."""
    label = f"({name})" if name == CLAIRVOYANT else name
    return [label, *(format(figures[key], form) for key, (_, form) in shown.items())]


def title(of: dict[str, Any]) -> str:
    """What was simulated."""
    load = {None: "the trace's own times", SOUGHT: "load sought"}.get(of["load"])
    load = load or f"load {of['load']:g}"
    return (
        f"{of['trace']}: {of['requests']} requests, {of['replicas']} x {of['device']}, "
        f"{load}, SLO: TTFT within {of['slo_ttft_s']:g} s"
    )


def table(result: dict[str, Any]) -> Table:
    """Of one simulation, for a terminal."""
    shown = columns(result["policies"])
    if not result["settings"]["tiers"]:
        shown.pop("moved_gbytes", None)
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("policy", no_wrap=True, min_width=16)
    for heading, _ in shown.values():
        made.add_column(heading, justify="right", no_wrap=True)
    for name, figures in result["policies"].items():
        made.add_row(*cells(name, figures, shown))
    return made
