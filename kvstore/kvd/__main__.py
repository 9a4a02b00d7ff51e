"""kvd as a process: `python -m kvstore.kvd --socket PATH`, or `--config cluster.toml`.

Prints `READY unix:PATH` once users may come. A caller's mistake is one line on stderr.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from events.errors import WarmrouteError
from events.parent import follow_parent
from events.tls import check_mutual, server_context
from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.segment import UNIT_BYTES, Segment, round_up
from kvstore.arena.source import ArenaSource
from kvstore.kvd.metrics import serve_metrics
from kvstore.kvd.place import Place, host_store_name
from kvstore.kvd.server import serve
from kvstore.kvd.settings import KvdSettings, settings_of
from kvstore.peer.server import PeerServer

log = logging.getLogger("kvd")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a stop on request, 1 after anything else."""
    parent = os.getppid()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        settings = settings_of(argv)
        if settings.die_with_parent:
            follow_parent(parent)
        asyncio.run(_serve(settings))
    except (ValueError, OSError, WarmrouteError) as error:
        print(f"kvd: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: KvdSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ExitStack() as stack:
        place = Place(settings.socket)
        stack.callback(place.leave)
        segment = Segment.shared(max(UNIT_BYTES, round_up(settings.arena_bytes)))
        arena = Arena(segment, ArenaLimits(scope_share=settings.tenant_share))
        _serve_beside(arena, settings, stack)
        listener = place.listen()
        print(f"READY unix:{settings.socket}", flush=True)
        await serve(arena, listener, place.boot, stop)


def _serve_beside(arena: Arena, settings: KvdSettings, stack: ExitStack) -> None:
    """What has threads of its own: other hosts, and whoever reads metrics."""
    if settings.peer_host:
        source = ArenaSource(arena, "peers")
        check_mutual(settings.peer_tls, "kv.peer_tls")
        tls = None if settings.peer_tls is None else server_context(settings.peer_tls)
        at = settings.peer_host, settings.peer_port
        name = host_store_name(str(settings.socket))
        peers = PeerServer(source, settings.secret, *at, tls, name)
        peers.start()
        stack.callback(source.close)
        stack.callback(peers.close)
        log.info("other hosts find the blocks at %s", peers.url)
    if settings.metrics_port:
        stack.callback(serve_metrics(arena.stats, settings.metrics_port))


if __name__ == "__main__":
    sys.exit(main())
