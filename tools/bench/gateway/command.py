"""Requests and chunks a second through a gateway that has one core, and what each costs.

Ours and, where they are installed (`pip install -e '.[peers]'`, or any folder given with
`--peers`), sglang-router and vllm-router with their cache_aware policies, over fake workers that
answer at once; and "floor", which passes bytes on unread: what the sockets alone cost. CPU time is
the target's user and system time: wall rates mean something only on a quiet machine with a core for
the target and one for everything else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from subprocess import run
from typing import Any

from tools.bench.child import python
from tools.bench.gateway.prompts import SIZES
from tools.bench.gateway.targets import (
    OTHER_CPU,
    TARGETS,
    Running,
    Setting,
    direct,
    missing,
    stretched_model,
)
from tools.errors import CommandError
from tools.fetch import default_model
from tools.flags import output_file, positive

CONNECTIONS = {"2k": 64, "64k": 32}
STREAMS = 200
STREAM_TOKENS = 400
WARM_REQUESTS = 512


def _load(running: Running, size: str, connections: int, *more: str) -> dict[str, Any]:
    """The clients' report, and the target's CPU seconds meanwhile. Raises CommandError."""
    command = ["taskset", "-c", str(OTHER_CPU), *python("-m", "tools.bench.gateway.load")]
    command += ["--port", str(running.port), "--size", size, "--connections", str(connections)]
    before_s = running.child.cpu_s()
    done = run([*command, *more], check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    report["cpu_s"] = running.child.cpu_s() - before_s
    if report["errors"]:
        raise CommandError(f"{report['errors']} errors, the first: {report['first_error']}")
    return report


def _quantile(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


class Figures:
    """What was measured, by the names that the JSON file has."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.found: dict[str, Any] = {}
        self._seconds = str(flags.seconds)
        self._samples = flags.samples
        self._direct_ms: list[float] = []

    def note(self, name: str, target: str, value: float) -> None:
        """`name` may hold dots: one level each."""
        *levels, leaf = name.split(".")
        at = self.found
        for level in levels:
            at = at.setdefault(level, {})
        at.setdefault(leaf, {})[target] = value
        print(f"{name}.{target}: {value:,.3f}", flush=True)

    def plain(self, target: str, running: Running, size: str) -> None:
        """Closed loop, answers in one piece; every head has been seen, no tail has."""
        connections = CONNECTIONS[size]
        _load(running, size, connections, "--requests", str(WARM_REQUESTS))
        skip = str(1_000_000)
        got = _load(running, size, connections, "--seconds", self._seconds, "--skip", skip)
        self.note(f"rps.{size}", target, got["requests"] / got["seconds"])
        self.note(f"cpu_us_per_request.{size}", target, 1e6 * got["cpu_s"] / got["requests"])

    def stream(self, target: str, running: Running) -> None:
        """Many streams at once, one token a tick each."""
        more = ["--stream", "--max-tokens", str(STREAM_TOKENS), "--seconds", self._seconds]
        got = _load(running, "2k", STREAMS, *more)
        self.note("chunks_per_s", target, got["chunks"] / got["seconds"])
        self.note("cpu_us_per_chunk", target, 1e6 * got["cpu_s"] / max(1, got["chunks"]))

    def ttft(self, target: str, running: Running) -> None:
        """One keep-alive connection, stream after stream, against the same without a gateway."""
        times = self._ttft_ms(running)
        for name, share in (("p50", 0.50), ("p99", 0.99)):
            added = _quantile(times, share) - _quantile(self._direct_ms, 0.50)
            self.note(f"ttft_added_ms.{name}", target, added)

    def direct(self, running: Running) -> None:
        """What the clients and a worker take by themselves."""
        self._direct_ms = self._ttft_ms(running)
        self.note("ttft_direct_ms", "p50", _quantile(self._direct_ms, 0.50))

    def _ttft_ms(self, running: Running) -> list[float]:
        times: list[float] = _load(
            running, "2k", 1, "--stream", "--requests", str(self._samples), "--skip", "2000000"
        )["times_ms"]
        return times


def _measure_in(folder: Path, flags: argparse.Namespace, targets: list[str]) -> dict[str, Any]:
    model = stretched_model(flags.model or default_model(), folder)
    setting = Setting(folder, flags.tick_ms, flags.peers, model)
    figures = Figures(flags)
    with direct(setting) as running:
        figures.direct(running)
    for name in targets:
        with TARGETS[name](setting) as running:
            for size in SIZES:
                figures.plain(name, running, size)
            figures.ttft(name, running)
            figures.stream(name, running)
    return figures.found


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of all targets that are there. Raises CommandError."""
    absent = missing(flags.targets, flags.peers)
    for name in absent:
        print(f"{name}: not installed here (pip install -e '.[peers]'), left out")
    targets = [name for name in flags.targets if name not in absent]
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
        return _measure_in(Path(folder), flags, targets)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `measure` reads."""
    parser.add_argument("--targets", type=_targets, default=list(TARGETS))
    parser.add_argument("--peers", type=Path, help="a folder that the peers are installed in")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each closed loop")
    parser.add_argument("--samples", type=positive, default=500, help="streams for TTFT")
    parser.add_argument("--tick-ms", type=float, default=5.0, help="between tokens of a stream")


def _targets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise argparse.ArgumentTypeError(f"unknown target '{unknown[0]}'; known: {list(TARGETS)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warmroute bench gateway", description=__doc__)
    add_options(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(arguments)
    found = measure(flags)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
