"""`warmroute`: the command line. Each command lives in its own file and is imported when called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tools.errors import CommandError

COMMANDS = {
    "up": ("tools.up", "start nats-server, replicas and the gateway on this machine"),
    "warm": ("tools.warm", "make prompts warm on k replicas, and prove it"),
    "bench": ("tools.bench.cli", "measure: the routing demo, the engine, single parts"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute", description=__doc__.split(":", 1)[1].strip())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(words[:1])
    module = importlib.import_module(COMMANDS[chosen.command][0])
    try:
        return int(module.main(words[1:]) or 0)
    except CommandError as error:
        print(f"warmroute {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
