"""`warmroute bench kv`: each tier beside the plainest way to move the same bytes, in one run.

Ratios are what counts: both sides of each are measured in turns, so that a busy machine is busy for
both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from tools.flags import output_file

PARTS = {
    "arena": "tools.bench.kv.arena",
    "peer": "tools.bench.kv.peer",
    "valkey": "tools.bench.kv.valkey",
    "restore": "tools.bench.kv.restore",
}
"""Each has `measure() -> dict[str, float]`; what it calls over_X is NAME_over_X in the JSON."""
ON_REQUEST = {"lmcache": "tools.bench.kv.lmcache"}
"""What needs more than this environment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warmroute bench kv", description=__doc__)
    parts = PARTS | ON_REQUEST
    parser.add_argument("--only", choices=parts, action="append", help="may be given again")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(arguments)
    found: dict[str, object] = {}
    for name in flags.only or PARTS:
        figures = importlib.import_module(parts[name]).measure()
        found[name] = figures
        for key, value in figures.items():
            if key.startswith("over_"):
                found[f"{name}_{key}"] = value
            print(f"{name + '.' + key:32} {value:10.3f}")
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
