"""kvd as a process: `python -m kvstore.kvd --socket PATH --bytes N`.

Prints `READY unix:PATH` once users may come. A caller's mistake is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from events.parent import follow_parent
from kvstore.arena.arena import Arena, ArenaLimits
from kvstore.arena.segment import UNIT_BYTES, Segment, round_up
from kvstore.errors import StoreError
from kvstore.kvd.place import Place
from kvstore.kvd.server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a stop on request, 1 after anything else."""
    parent = os.getppid()
    options = _options(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        if options.die_with_parent:
            follow_parent(parent)
        asyncio.run(_serve(options))
    except (StoreError, OSError) as error:
        print(f"kvd: {error}", file=sys.stderr)
        return 1
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvstore.kvd", description="A host's shared KV memory.")
    parser.add_argument("--socket", type=Path, required=True, help="where users find it")
    parser.add_argument("--bytes", type=int, required=True, help="how much memory it takes")
    parser.add_argument(
        "--tenant-share", type=float, default=0.5, help="how much of it one tenant may take"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the parent ends")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    place = Place(options.socket)
    try:
        segment = Segment.shared(max(UNIT_BYTES, round_up(options.bytes)))
        arena = Arena(segment, ArenaLimits(scope_share=options.tenant_share))
        listener = place.listen()
        print(f"READY unix:{options.socket}", flush=True)
        await serve(arena, listener, place.boot, stop)
    finally:
        place.leave()


if __name__ == "__main__":
    sys.exit(main())
