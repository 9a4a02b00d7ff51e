"""`warmroute bench book`: simulates the standard scenarios and writes tools/bench/RESULTS.md."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tools.bench.book.scenarios import ALL, Scenario
from tools.bench.book.text import book
from tools.errors import CommandError
from tools.flags import positive
from tools.sim.call import TraceError
from tools.sim.settings import Settings
from tools.sim.simulate import EVERY, OURS, load_trace, seek_capacity, simulate

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
OUT = Path("bench-out")
BASE = Settings(policy=OURS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute bench book", description=__doc__)
    known = [scenario.name for scenario in ALL]
    parser.add_argument(
        "scenarios",
        nargs="*",
        metavar="SCENARIO",
        help=f"only these anew, beside what the files say of others: {', '.join(known)}",
    )
    parser.add_argument(
        "--policy",
        choices=EVERY,
        action="append",
        help="only these anew, beside what the files say of others under the same settings",
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="FOLDER")
    parser.add_argument(
        "--only-write", action="store_true", help="the book anew, from the figures that are there"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, metavar="N")
    return parser


def _one(scenario: Scenario, policy: str, data: Path) -> dict[str, Any]:
    """One policy in one scenario, in a process of its own."""
    file = data / scenario.trace
    trace = load_trace(str(file) if file.exists() else scenario.trace)
    settings = replace(BASE, **scenario.changes)
    began_s = time.process_time()
    if scenario.capacity_slo_s is None:
        result = simulate(trace, settings, [policy], scenario.slo_ttft_s)
    else:
        result = seek_capacity(trace, settings, [policy], scenario.capacity_slo_s)
    return result | {"cpu_s": {policy: round(time.process_time() - began_s, 1)}}


def _run(
    scenarios: Sequence[Scenario], policies: Sequence[str] | None, data: Path, jobs: int
) -> None:
    """Each scenario's figures go to a file as soon as all its policies are done."""
    wanted = [[p for p in s.policies if policies is None or p in policies] for s in scenarios]
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), gc.disable) as pool,
        Progress(transient=True) as progress,
    ):
        task = progress.add_task("policies", total=sum(map(len, wanted)))
        futures = [
            [pool.submit(_one, scenario, name, data) for name in names]
            for scenario, names in zip(scenarios, wanted, strict=True)
        ]
        for scenario, waiting in zip(scenarios, futures, strict=True):
            parts = []
            for future in waiting:
                parts.append(future.result())
                progress.advance(task)
            if parts:
                merged = _merged(scenario, parts)
                _file(scenario).write_text(json.dumps(merged, indent=2) + "\n")


def _merged(scenario: Scenario, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The new figures, and those of other policies that were made with the same settings."""
    settings = parts[0]["settings"]
    figures: dict[str, Any] = {}
    cpu_s: dict[str, float] = {}
    if _file(scenario).exists():
        former = json.loads(_file(scenario).read_text())
        if former["settings"] == settings:
            figures, cpu_s = former["policies"], former.get("cpu_s", {})
    for part in parts:
        figures |= part["policies"]
        cpu_s |= part["cpu_s"]
    order = [name for name in EVERY if name in figures]
    return {"settings": settings, "policies": {n: figures[n] for n in order}, "cpu_s": cpu_s}


def _file(scenario: Scenario) -> Path:
    return OUT / f"{scenario.name}.json"


def _versions() -> str:
    """Of what the figures depend on."""
    return (
        f"warmroute {version('warmroute')}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}."
    )


def main(argv: Sequence[str]) -> int:
    """Simulate, write the figures, write the book. Raises CommandError."""
    flags = _parser().parse_args(argv)
    known = {scenario.name: scenario for scenario in ALL}
    if unknown := [name for name in flags.scenarios if name not in known]:
        raise CommandError(f"unknown scenario '{unknown[0]}'; known: {', '.join(known)}")
    OUT.mkdir(exist_ok=True)
    chosen = [] if flags.only_write else [known[name] for name in flags.scenarios or known]
    try:
        _run(chosen, flags.policy, flags.data, flags.jobs)
    except TraceError as error:
        raise CommandError(f"{error} (--data names the folder of the traces)") from error
    read = [(s, json.loads(_file(s).read_text())) for s in ALL if _file(s).exists()]
    results = [(scenario, of) for scenario, of in read if OURS in of["policies"]]
    simulated = [scenario for scenario, _ in results]
    lacking = [scenario.title for scenario in ALL if scenario not in simulated]
    RESULTS.write_text(book(results, lacking, _versions()))
    return 0
