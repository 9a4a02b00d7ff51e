"""`warmroute bridge`: flags and process around one sidecar."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import load_cluster
from configs.model.card import load_card
from configs.schema import ClusterConfig
from events.errors import WarmrouteError
from events.nats import join
from events.parent import follow_parent
from router.backends.roster import Backend, roster
from tools.errors import CommandError

BOOT_FOLDER = "boots"
CANCEL_AGAIN_S = 0.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute bridge",
        description="Follow the KV events of a vLLM or SGLang server and tell the routers on the "
        "bus what it has cached. It runs beside the server, one for each backend with "
        'events = "bridge".',
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="the cluster file (TOML)")
    add("--id", required=True, help="which backend of the file this is")
    add("--events", help="where the server publishes, tcp://host:port (default: it is asked)")
    add("--replay", default="", help="where it replays what was missed, tcp://host:port")
    add("--die-with-parent", action="store_true", help="stop when the parent ends")
    return parser


def _backend(config: ClusterConfig, own_id: str) -> Backend:
    try:
        backend = roster(config).get(own_id)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if backend is None:
        raise CommandError(f"the cluster file has no backend '{own_id}'")
    if not backend.bridged:
        raise CommandError(f"backend '{own_id}' needs events = \"bridge\" in the cluster file")
    return backend


async def _serve(config: ClusterConfig, backend: Backend, options: argparse.Namespace) -> None:
    # Late: pyzmq is an extra, and only whoever bridges needs it.
    from tools.bridge.discover import discover
    from tools.bridge.sidecar import Sidecar
    from tools.bridge.source import Endpoints

    async def locate() -> Endpoints:
        if options.events:
            return Endpoints(options.events, options.replay)
        return await discover(backend)

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    card = await asyncio.to_thread(load_card, Path(config.model.path))
    bus = await join(config.bus, backend.id)
    state_folder = options.config.parent / BOOT_FOLDER
    sidecar = Sidecar(config, backend, card, bus, locate, state_folder)
    running = asyncio.create_task(sidecar.run())
    print(f"READY {backend.url}", flush=True)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        stopped.cancel()
        while not running.done():
            # Once is not enough: the bus's client loses a cancellation that meets a request.
            running.cancel()
            await asyncio.wait({running}, timeout=CANCEL_AGAIN_S)
        if not running.cancelled():
            running.exception()
        with contextlib.suppress(WarmrouteError):
            await bus.close()


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM. Raises CommandError or ConfigError."""
    parent = os.getppid()
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    if options.die_with_parent:
        follow_parent(parent)
    config = load_cluster(options.config)
    backend = _backend(config, options.id)
    try:
        asyncio.run(_serve(config, backend, options))
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is missing: pip install -e '.[bridge]'") from None
    except WarmrouteError as error:
        raise CommandError(str(error)) from None
    return 0
