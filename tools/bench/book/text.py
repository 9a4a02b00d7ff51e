"""The book as Markdown, from the figures alone. The first paragraph says where a peer wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.book.goals import goals
from tools.bench.book.live import section, verdict
from tools.bench.book.scenarios import Scenario
from tools.sim.settings import CLAIRVOYANT
from tools.sim.simulate import OURS
from tools.sim.table import COLUMNS, cells, columns, title

Result = dict[str, Any]

LOWER = {
    "ttft_mean_s": "mean TTFT",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "ttft_p99_s": "TTFT p99",
    "e2e_mean_s": "mean E2E",
    "itl_p99_ms": "ITL p99",
    "max_over_mean_load": "evenness of load",
    "moved_gbytes": "GB moved",
}
HIGHER = {
    "cached_token_ratio": "cached-token ratio",
    "slo_share": "share within the SLO",
    "goodput_per_s": "goodput",
    "jain_tenant_ttft": "fairness",
    "capacity_load": "capacity",
}
APART = ("ttft_mean_s", "ttft_p90_s", "cached_token_ratio", "capacity_load")
"""Of which the spread over seeds is told."""

SHOWN = {key: form for key, form in COLUMNS.items() if key in LOWER | HIGHER}
EQUAL = 0.005
"""A smaller difference is none."""

ABOUT = (
    "Written by `make bench` (`warmroute bench book`) from the figures in `bench-out/`, never by "
    "hand. {versions} Each replica is the real scheduler and cache over a device that only takes "
    "time, each choice is the router's own code (`tools/sim`). Times in s, gaps between tokens "
    "(ITL) in ms, load as the largest over the mean, capacity as a multiple of what the replicas "
    "could serve without any cache, by bisection to 3 %; good/s are requests a second within the "
    "SLO; fair is Jain's index of the tenants' mean TTFT, 1 where all wait alike; `(clairvoyant)` "
    "sees true caches and queues and is no competitor. Peers' rules get our index of real events, "
    "which can only help them; each file in `router/policies/` names its source."
)


@dataclass(frozen=True, slots=True)
class Win:
    """A peer is better in one figure, by a share of ours."""

    peer: str
    figure: str
    theirs: float
    ours: float

    @property
    def share(self) -> float:
        """1 where ours is nothing."""
        return abs(self.theirs - self.ours) / self.ours if self.ours else 1.0

    def __str__(self) -> str:
        return (
            f"{self.peer} in {self.figure} ({self.theirs:.3g} against {self.ours:.3g}, "
            f"{self.share:.1%})"
        )


def wins(result: Result) -> list[Win]:
    """The best peer of each figure in which ours is not the best."""
    policies = result["policies"]
    ours = policies[OURS]
    peers = {name: f for name, f in policies.items() if name not in (OURS, CLAIRVOYANT)}
    found: list[Win] = []
    if not peers:
        return found
    for key, figure in (LOWER | HIGHER).items():
        if key not in ours:
            continue
        pick = min if key in LOWER else max
        best = pick(peers, key=lambda name: peers[name][key])
        win = Win(best, figure, peers[best][key], ours[key])
        better = win.theirs < win.ours if key in LOWER else win.theirs > win.ours
        if better and win.share > EQUAL:
            found.append(win)
    return found


def book(
    results: Sequence[tuple[Scenario, Result]],
    lacking: Sequence[str],
    versions: str,
    live: dict[str, Any] | None = None,
) -> str:
    """All of it; `lacking` are the titles of what was not simulated."""
    parts = [
        "# Policies side by side",
        " ".join(filter(None, (_verdict(results), live and verdict(live)))),
        ABOUT.format(versions=versions),
        *([f"Not simulated yet: {'; '.join(lacking)}."] if lacking else []),
        *_goals(results),
        *(section(live) if live else []),
        *(_section(scenario, result) for scenario, result in results),
    ]
    return "\n\n".join(parts) + "\n"


def _goals(results: Sequence[tuple[Scenario, Result]]) -> list[str]:
    found = goals(results)
    if not found:
        return []
    met = sum(goal.met for goal in found)
    head = ["where", "goal", "ours", "theirs", "ours / theirs", "met"]
    rows = [head, ["---", "---", "---:", "---", "---:", "---"], *(goal.row() for goal in found)]
    return [f"## Goals: {met} of {len(found)} met", _lines(rows)]


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _verdict(results: Sequence[tuple[Scenario, Result]]) -> str:
    compared = [(s, result) for s, result in results if len(result["policies"]) > 1]
    found = [(scenario, wins(result)) for scenario, result in compared]
    mean = LOWER["ttft_mean_s"]
    timed = [won for (_, won), (_, of) in zip(found, compared, strict=True) if _timed(of)]
    best = sum(not any(win.figure == mean for win in won) for won in timed)
    lost = [
        f"{scenario.title}: " + ", ".join(map(str, won)) + "." for scenario, won in found if won
    ]
    first = (
        f"Ours has the lowest mean TTFT, or one within {EQUAL:.1%} of it, in {best} of "
        f"{len(timed)} scenarios."
    )
    if not lost:
        return f"{first} No peer wins in any column."
    said = f"Where a peer wins a column by more than {EQUAL:.1%}, the best of them each time:"
    return " ".join((first, said, *lost))


def _timed(result: Result) -> bool:
    """Whether first tokens were timed, not only a capacity sought."""
    return "ttft_mean_s" in result["policies"][OURS]


def _section(scenario: Scenario, result: Result) -> str:
    of, policies = result["settings"], result["policies"]
    shown = columns(policies, SHOWN)
    if not of.get("tiers"):
        shown.pop("moved_gbytes", None)
    head = ["policy", *(heading for heading, _ in shown.values())]
    rows = [head, ["---", *["---:"] * len(shown)]]
    rows += [cells(name, figures, shown) for name, figures in policies.items()]
    notes = " ".join(filter(None, (scenario.note, _cpu(result), _seeds(result), _code(result))))
    parts = (f"## {scenario.title}", _setting(of), notes, _lines(rows))
    return "\n\n".join(filter(None, parts))


def _setting(of: dict[str, Any]) -> str:
    """What can't be seen in the heading."""
    words = [title(of), f"{of['kv_tokens']:,} KV tokens each"]
    words += [
        f"{tier['tokens']:,} in {'a shared store' if tier['shared'] else 'host memory'} at "
        f"{tier['gbytes_per_s']:g} GB/s"
        for tier in of.get("tiers", ())
    ]
    return f"`{'; '.join(words)}`"


def _seeds(result: Result) -> str:
    """What the figures are means of, and how far our seeds lie apart."""
    runs = result.get("runs", {})
    many = {name: of for name, of in runs.items() if len(of) > 1}
    if not many:
        return ""
    counts = ", ".join(f"{name} {len(of)}" for name, of in many.items())
    apart = []
    for key in APART:
        figure = (LOWER | HIGHER)[key]
        found = [figures[key] for figures in many.get(OURS, {}).values() if key in figures]
        if found:
            apart.append(f"{figure} {min(found):.3g} to {max(found):.3g}")
    ours = f"; ours: {', '.join(apart)}" if apart else ""
    return f"Means over seeds ({counts}){ours}."


def _code(result: Result) -> str:
    """Which code made which rows."""
    made: dict[str, list[str]] = {}
    known = result.get("code", {})
    for name in result["policies"]:
        if name in known:
            made.setdefault(known[name], []).append(name)
    if len(made) == 1:
        return f"Code: {next(iter(made))}."
    parts = [f"{code} ({', '.join(names)})" for code, names in made.items()]
    return f"Code: {'; '.join(parts)}." if parts else ""


def _cpu(result: Result) -> str:
    """What it took to simulate."""
    cpu_s = result.get("cpu_s", {})
    return f"Simulated in {max(cpu_s.values()):.0f} s of one core's CPU a policy." if cpu_s else ""
