"""`warmroute sim --pd`: which replicas should compute prompts and which answer; then simulated.

The worksheet says what each ratio sustains; the runs say which requests keep the objectives there:
with all replicas doing both, with every long prompt handed off, and as the router would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.show import print_table
from tools.sim.call import Trace
from tools.sim.ratio import Ratio, best, ratios, work_of
from tools.sim.run import Run
from tools.sim.settings import Settings
from tools.sim.tiers import TierSpec
from tools.sim.world import World

COLOCATED, ALWAYS, OURS = "colocated", "always split", "by cost"


def roles_report(
    trace: Trace,
    base: Settings,
    slo_ttft_s: float,
    slo_tpot_ms: float,
    away: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """`{"work": ..., "ratios": [...], "best": "P:D", "runs": [...]}`. `base` says how many replicas
    there are in all, and has the store that they share. `say` hears of each run before it."""
    count, link = len(base.names), _shared(base.tiers)
    work = work_of(trace, base.device, base.kv_tokens, slo_tpot_ms, base.split_min_tokens)
    found = ratios(work, count, link.gbytes_per_s, away)
    chosen = best(found)
    say(f"simulating {count} replicas that do both")
    runs = [figures(COLOCATED, trace, base, slo_ttft_s, slo_tpot_ms)]
    for ratio in _near(found, chosen):
        say(f"simulating {ratio.name}: {OURS}, then {ALWAYS}")
        roles = {"replicas": 0, "prefill": ratio.prefill, "decode": ratio.decode}
        split = replace(base, **roles, itl_deadline_ms=slo_tpot_ms)
        runs.append(figures(OURS, trace, split, slo_ttft_s, slo_tpot_ms))
        forced = replace(split, always_split=True)
        runs.append(figures(ALWAYS, trace, forced, slo_ttft_s, slo_tpot_ms))
    return {
        "work": asdict(work),
        "ratios": [asdict(ratio) for ratio in found],
        "best": chosen.name,
        "slo_ttft_s": slo_ttft_s,
        "slo_tpot_ms": slo_tpot_ms,
        "away": away,
        "runs": runs,
    }


def figures(
    how: str, trace: Trace, settings: Settings, slo_ttft_s: float, slo_tpot_ms: float
) -> dict[str, Any]:
    """Of one fleet. A request is good whose first token and whose further ones come in time."""
    run = World(trace, settings).run()
    served = [record for record in run.records if not record.failed]
    good = sum(r.ttft_s <= slo_ttft_s and 1e3 * r.tpot_s <= slo_tpot_ms for r in served)
    return {
        "how": how,
        "ratio": f"{settings.prefill}:{settings.decode or settings.replicas}",
        "goodput_per_s": run.rate_per_s * good / max(1, len(run.records)),
        "slo_share": good / max(1, len(run.records)),
        "split_share": sum(bool(r.prefilled_by) for r in served) / max(1, len(served)),
        "ttft_p90_s": _p90([r.ttft_s for r in served]),
        "tpot_p90_ms": 1e3 * _p90([r.tpot_s for r in served]),
        "requests_per_s": run.rate_per_s,
        "prefill_busy": _busy(run, "p"),
        "decode_busy": _busy(run, "d" if settings.decode else "r"),
    }


def print_roles(console: Console, report: dict[str, Any]) -> None:
    """Both tables, and the ratio in a sentence."""
    work = report["work"]
    console.print(
        f"a request takes {work['prefill_ms']:.1f} ms of those that compute, "
        f"{work['answer_ms']:.1f} ms of those that answer {work['seats']} at once, "
        f"and moves {work['moved_bytes'] / 1e6:.1f} MB",
        highlight=False,
    )
    print_table(console, _worksheet(report))
    console.print(f"best ratio by the worksheet: {report['best']}", highlight=False)
    print_table(console, _simulated(report["runs"]))


def _near(found: Sequence[Ratio], chosen: Ratio) -> list[Ratio]:
    """The chosen one and its neighbours."""
    return [r for r in found if r.prefill and abs(r.prefill - chosen.prefill) <= 1]


def _shared(tiers: Iterable[TierSpec]) -> TierSpec:
    return next(tier for tier in tiers if tier.shared)


def _p90(values: Sequence[float]) -> float:
    return float(np.quantile(values or [0.0], 0.9))


def _busy(run: Run, letter: str) -> float:
    shares = [s / max(1e-9, run.span_s) for name, s in run.busy_s.items() if name[0] == letter]
    return sum(shares) / max(1, len(shares))


def _worksheet(report: dict[str, Any]) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("P:D", no_wrap=True)
    for heading in ("requests/s", f"with {report['away']} away", "limited by"):
        made.add_column(heading, justify="right", no_wrap=True)
    for of in report["ratios"]:
        name = f"{of['prefill']}:{of['decode']}" if of["prefill"] else "all both"
        rates = (f"{of['rate_per_s']:.2f}", f"{of['rate_less_per_s']:.2f}")
        made.add_row(name, *rates, of["limit"])
    return made


def _simulated(runs: Sequence[dict[str, Any]]) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("P:D", no_wrap=True)
    made.add_column("prompts", no_wrap=True)
    columns = {
        "goodput_per_s": ("good/s", ".2f"),
        "slo_share": ("in SLO", ".3f"),
        "split_share": ("split", ".2f"),
        "ttft_p90_s": ("TTFT p90", ".2f"),
        "tpot_p90_ms": ("TPOT p90", ".1f"),
        "prefill_busy": ("P busy", ".2f"),
        "decode_busy": ("D busy", ".2f"),
    }
    for heading, _ in columns.values():
        made.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        cells = [format(run[key], form) for key, (_, form) in columns.items()]
        made.add_row(run["ratio"], run["how"], *cells)
    return made
