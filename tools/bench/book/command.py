"""`warmroute bench book`: simulates the standard scenarios, has live gateways answer the same
requests in turn, and writes tools/bench/RESULTS.md; pictures of what is anew go to bench-out/."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from rich.progress import Progress

from tools.bench.book.files import OUT, Simulated, read, write
from tools.bench.book.live import LIVE, read_live, run_live
from tools.bench.book.scenarios import ALL, Scenario
from tools.bench.book.text import book
from tools.errors import CommandError
from tools.flags import positive
from tools.sim.call import TraceError
from tools.sim.plot import can_draw, draw
from tools.sim.settings import Settings
from tools.sim.simulate import EVERY, OURS, load_trace, seek_capacity, simulate

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
BASE = Settings(policy=OURS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute bench book", description=__doc__)
    known = [*(scenario.name for scenario in ALL), LIVE]
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
    parser.add_argument(
        "--peers",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help=f"for '{LIVE}': where other projects' gateways are installed; may be repeated",
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, metavar="N")
    return parser


def _collect_rarely() -> None:
    """A simulated world is one large cycle: looking for such ones at every turn costs a tenth of
    the time, never doing so takes all memory in a search for capacities."""
    gc.set_threshold(500_000, 10, 10)


def _one(scenario: Scenario, policy: str, seed: int, data: Path) -> Simulated:
    """One policy in one scenario with one seed, in a process of its own."""
    file = data / scenario.trace
    trace = load_trace(str(file) if file.exists() else scenario.trace)
    settings = replace(BASE, **scenario.changes, seed=seed)
    gc.collect()
    began_s = time.process_time()
    if scenario.capacity_slo_s is None:
        result = simulate(trace, settings, [policy], scenario.slo_ttft_s)
    else:
        result = seek_capacity(trace, settings, [policy], scenario.capacity_slo_s)
    cpu_s = round(time.process_time() - began_s, 1)
    return Simulated(policy, seed, result["settings"], result["policies"][policy], cpu_s)


def _run(
    scenarios: Sequence[Scenario], policies: Sequence[str] | None, data: Path, jobs: int
) -> None:
    """Each scenario's figures go to a file as soon as all its policies are done."""
    wanted = [
        [(p, seed) for p in s.policies if policies is None or p in policies for seed in s.seeds]
        for s in scenarios
    ]
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), _collect_rarely) as pool,
        Progress(transient=True) as progress,
    ):
        task = progress.add_task("policies", total=sum(map(len, wanted)))
        futures = [
            [pool.submit(_one, scenario, *one, data) for one in ones]
            for scenario, ones in zip(scenarios, wanted, strict=True)
        ]
        for scenario, waiting in zip(scenarios, futures, strict=True):
            made = []
            for future in waiting:
                made.append(future.result())
                progress.advance(task)
            if made:
                write(scenario, made)


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
    if unknown := [name for name in flags.scenarios if name not in (*known, LIVE)]:
        raise CommandError(f"unknown scenario '{unknown[0]}'; known: {', '.join((*known, LIVE))}")
    OUT.mkdir(exist_ok=True)
    chosen = [] if flags.only_write else flags.scenarios or [*known, LIVE]
    try:
        _run([known[n] for n in chosen if n != LIVE], flags.policy, flags.data, flags.jobs)
    except TraceError as error:
        raise CommandError(f"{error} (--data names the folder of the traces)") from error
    if LIVE in chosen:
        run_live(flags.peers)
    if can_draw():
        _draw([known[name] for name in chosen if name != LIVE])
    _write()
    return 0


def _draw(scenarios: Sequence[Scenario]) -> None:
    """A picture of each beside its figures."""
    for scenario in scenarios:
        if found := read(scenario):
            draw(found, OUT / f"{scenario.name}.png")


def _write() -> None:
    """Raises CommandError where nothing was measured. A book of less than all goes beside the
    figures: it would replace one that tells of more."""
    found = [(scenario, read(scenario)) for scenario in ALL]
    results = [(scenario, of) for scenario, of in found if of and OURS in of["policies"]]
    simulated = [scenario for scenario, _ in results]
    lacking = [scenario.title for scenario in ALL if scenario not in simulated]
    if not results:
        raise CommandError(f"no figures of '{OURS}' in {OUT}/: the book stays as it is")
    live = read_live()
    path = OUT / RESULTS.name if lacking or live is None else RESULTS
    path.write_text(book(results, lacking, _versions(), live))
    print(f"the book is {path}")
