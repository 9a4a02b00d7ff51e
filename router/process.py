"""The gateway as a process: `python -m router.app --config cluster.toml [--die-with-parent]`.

Prints `READY <url>` once the port is bound. SIGTERM and SIGINT drain: not ready at once, streams
finish within the configured time, exit 0. Whatever can't work is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from configs.load import load_cluster
from configs.model.adapter import adapter_card
from configs.model.card import load_card
from configs.schema import ClusterConfig
from events.errors import WarmrouteError
from events.garbage import settle_memory
from events.nats import join
from events.parent import follow_parent
from events.secrets import parse_secret
from events.subjects import check_id
from router.gateway import Gateway
from router.telemetry.gauges import register_bus

_SPARE_FILES = 1_024
MEET_S = 2.0
"""READY waits that long for replicas that are there already: then none of the first requests is
refused, and none is sent blindly. Without any it comes all the same, and /ready tells."""


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="router.app", description="The OpenAI gateway.")
    parser.add_argument("--config", type=Path, required=True, help="the cluster file (TOML)")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the parent ends")
    return parser.parse_args(argv)


def _raise_file_limit(connections: int) -> None:
    """Each stream is two files: take what the system allows, as far as it is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _load(path: Path) -> ClusterConfig:
    config = load_cluster(path)
    check_id(config.router.id)
    parse_secret(config.secret)
    return config


async def _serve(config: ClusterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    card = await asyncio.to_thread(load_card, Path(config.model.path))
    revisions = {
        of.name: await asyncio.to_thread(load_card, Path(of.path)) for of in config.revisions
    }
    adapters = {
        of.name: (await asyncio.to_thread(adapter_card, of.name, Path(of.path), card.shape)).digest
        for of in config.adapters
    }
    bus = await join(config.bus, config.router.id)
    gateway = Gateway(config, card, bus, revisions, adapters)
    register_bus(gateway.services.metrics, bus.stats)
    try:
        await gateway.start()
        await gateway.meet_replicas(MEET_S)
        settle_memory()
        print(f"READY {gateway.url}", flush=True)
        await stop.wait()
        await gateway.drain()
    finally:
        await gateway.close()
        await bus.close()


def run(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a stop on request, 1 after anything else."""
    parent = os.getppid()
    options = _options(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        if options.die_with_parent:
            follow_parent(parent)
        config = _load(options.config)
        _raise_file_limit(config.router.max_connections)
        uvloop.run(_serve(config))
    except (ValueError, OSError, WarmrouteError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0
