"""The figures' files: each policy's runs by seed, their means, and which code made them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.book.scenarios import Scenario
from tools.sim.simulate import EVERY

OUT = Path("bench-out")
EARLIER = "earlier"
"""Code that nobody wrote down."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One policy's run with one seed."""

    policy: str
    seed: int
    settings: dict[str, Any]
    figures: dict[str, Any]
    cpu_s: float


def read(scenario: Scenario) -> dict[str, Any] | None:
    """`{"settings", "policies": means, "runs": {policy: {seed: figures}}, "cpu_s", "code"}`."""
    path = OUT / f"{scenario.name}.json"
    return _whole(json.loads(path.read_text())) if path.exists() else None


def write(scenario: Scenario, made: Sequence[Simulated]) -> None:
    """Beside what the file says of other policies under the same settings."""
    settings = _without_seed(made[0].settings)
    former = read(scenario)
    if former is None or former["settings"] != settings:
        former = {"runs": {}, "cpu_s": {}, "code": {}}
    code = _code()
    runs: dict[str, dict[str, Any]] = former["runs"]
    for name in dict.fromkeys(run.policy for run in made):
        runs[name] = {str(run.seed): run.figures for run in made if run.policy == name}
        former["code"][name] = code
        former["cpu_s"][name] = max(run.cpu_s for run in made if run.policy == name)
    kept = {"runs": {name: runs[name] for name in EVERY if name in runs}}
    told = {"settings": settings, "policies": means(kept["runs"])}
    whole = told | kept | {key: former[key] for key in ("cpu_s", "code")}
    (OUT / f"{scenario.name}.json").write_text(json.dumps(whole, indent=2) + "\n")


def means(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each policy's seeds; what is no number is the first seed's."""
    return {name: _mean(list(of.values())) for name, of in runs.items()}


def _mean(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = of[0]
    return {
        key: sum(figures[key] for figures in of) / len(of) if isinstance(value, float) else value
        for key, value in first.items()
    }


def _whole(found: dict[str, Any]) -> dict[str, Any]:
    """What older code wrote has one seed, in its settings, and no runs."""
    if "runs" in found:
        return found
    seed = str(found["settings"]["seed"])
    runs = {name: {seed: figures} for name, figures in found["policies"].items()}
    code = dict.fromkeys(runs, EARLIER)
    settings = _without_seed(found["settings"])
    return {"cpu_s": {}, **found, "settings": settings, "runs": runs, "code": code}


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seed"}


def _code() -> str:
    """The commit, where this is a checkout."""
    asked = ["git", "describe", "--always"]
    try:
        said = subprocess.run(
            asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return EARLIER
    return said.stdout.strip()
