"""How many calls one request takes in the gateway, and one delta, by module.

A number that other work on the machine does not move, unlike time: each request comes alone, over
one connection that is kept, to fake replicas that answer at once. What the bus and the clock bring
meanwhile is told aside.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.bench.child import python, until
from tools.bench.gateway.prompts import SIZES
from tools.bench.gateway.targets import Running, Setting, ours, stretched_model
from tools.fetch import default_model
from tools.flags import output_file, positive

WARM_REQUESTS = 128
STREAM_TOKENS = 200
Found = dict[str, dict[str, float]]
"""Python and builtin calls of one request, by module and function."""


def _ask(running: Running, size: str, *more: str) -> dict[str, float]:
    command = python("-m", "tools.bench.gateway.load", "--port", str(running.port))
    done = subprocess.run(
        [*command, "--size", size, "--connections", "1", *more], check=True, capture_output=True
    )
    report: dict[str, float] = json.loads(done.stdout)
    return report


def _count(running: Running, file: Path, size: str, requests: int, *more: str) -> Found:
    """Calls per request, or per chunk where there are several to a request."""
    _ask(running, size, "--requests", str(WARM_REQUESTS))
    with suppress(FileNotFoundError):
        file.unlink()
    running.child.signal(signal.SIGUSR1)
    report = _ask(running, size, "--requests", str(requests), "--skip", "1000000", *more)
    running.child.signal(signal.SIGUSR2)
    until(file.exists, 10.0, "nothing counted")
    unit = max(report["requests"], report["chunks"])
    return {
        name: {kind: count / unit for kind, count in counts.items()}
        for name, counts in json.loads(file.read_text()).items()
    }


def measure(model: Path, requests: int) -> dict[str, Found]:
    """By size of the prompt, and of a delta."""
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as name:
        folder = Path(name)
        setting = Setting(folder, 1.0, None, stretched_model(model, folder))
        file = folder / "calls.json"
        counted = ["-m", "tools.bench.gateway.counted", str(file)]
        with ours(setting, counted) as running:
            found = {size: _count(running, file, size, requests) for size in SIZES}
            more = ("--stream", "--max-tokens", str(STREAM_TOKENS))
            found["delta"] = _count(running, file, "2k", 10, *more)
        return found


def _modules(found: Found) -> list[tuple[str, float, float]]:
    python_calls: Counter[str] = Counter()
    builtin: Counter[str] = Counter()
    for name, counts in found.items():
        module = name.partition(":")[0]
        if module == "aside":
            continue
        python_calls[module] += counts.get("python", 0)  # type: ignore[assignment]
        builtin[module] += counts.get("builtin", 0)  # type: ignore[assignment]
    names = sorted(python_calls | builtin, key=lambda of: -python_calls[of] - builtin[of])
    return [(name, python_calls[name], builtin[name]) for name in names]


def _show(kind: str, found: Found, rows: int) -> None:
    modules = _modules(found)
    python_calls, builtin = (sum(row[at] for row in modules) for at in (1, 2))
    aside = found["aside"]["python"]
    print(f"{kind}: {python_calls:.1f} Python calls, {builtin:.1f} of builtins ({aside:.1f} aside)")
    for name, own, others in modules[:rows]:
        print(f"    {name:44} {own:8.1f} {others:8.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warmroute bench calls", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--requests", type=positive, default=200, help="that are counted")
    parser.add_argument("--rows", type=positive, default=25, help="modules shown")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all functions here")
    flags = parser.parse_args(arguments)
    found = measure(flags.model or default_model(), flags.requests)
    for kind, counts in found.items():
        _show(kind, counts, flags.rows)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
