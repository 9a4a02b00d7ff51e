"""`warmroute`: the command line. Whatever takes its time is imported where Ctrl-C is an answer."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        from tools.commands import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
