"""One replica as a process: `python -m replica.server --config cluster.toml --replica ID`.

Owns start and end. Starting takes what can fail early first; ending lets streams finish: readiness
flips, new requests are sent elsewhere, then bye. A caller's mistake is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from aiohttp import web

from configs.load import ConfigError, adapter_paths, load_cluster, model_path, replica_of
from configs.model.adapter import AdapterCard, adapter_card
from configs.model.card import ModelCard, load_card
from configs.schema import ClusterConfig, ReplicaConfig
from events.errors import WarmrouteError
from events.garbage import settle_memory
from events.grammar import GRAMMAR
from events.load import AdapterNote, DigestShape, KVLayout, ReplicaHello
from events.nats import join
from events.parent import follow_parent
from events.secrets import link_secret, parse_secret
from events.subjects import check_id
from events.tls import check_mutual, server_context
from kvstore.identity import HASH_VERSION, Namespace, key_id
from kvstore.layout import Layout
from replica.boot import claim_boot
from replica.engine.loop import EngineThread
from replica.front.app import FrontApp
from replica.front.build import Patience, build_front
from replica.front.check import Limits
from replica.front.intake import Served
from replica.front.link import LinkSettings
from replica.front.output import StepQueue
from replica.grammar.compiler import GrammarCompiler
from replica.publish import Publisher
from replica.tiers.build import build_tiers
from replica.tiers.metrics import TierMetrics

if TYPE_CHECKING:
    from replica.engine.messages import AdapterLoader
    from replica.kv_events.publisher import KvEventPublisher
    from replica.runner.runner import ModelRunner
    from replica.sched.plan import Runner
    from replica.tiers.mover import BlockMover
    from replica.tiers.tiers import ReplicaTiers

log = logging.getLogger("replica")

WATCH_S = 1.0
CLOSE_S = 5.0
BOOT_FOLDER = "boots"


class ReplicaLostError(WarmrouteError):
    """The replica can't go on; whoever started it may start it again."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded before the event loop runs. `door` is bound, not listening."""

    cluster: ClusterConfig
    replica: ReplicaConfig
    card: ModelCard
    adapters: Mapping[str, AdapterCard]
    layout: KVLayout
    runner: Runner
    bank: AdapterLoader | None
    mover: BlockMover
    door: socket.socket
    tls: ssl.SSLContext | None
    state_folder: Path

    @property
    def context_tokens(self) -> int:
        """What settings and model both allow."""
        return min(self.replica.context_tokens, self.card.shape.context_tokens)

    @property
    def url(self) -> str:
        """Where the replica is reached."""
        host, port = self.door.getsockname()[:2]
        scheme = "http" if self.cluster.link_tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def link_url(self) -> str:
        """Where routers dial: ws:// or wss://."""
        return "ws" + self.url.removeprefix("http") + "/link"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a stop on request, 1 after anything else."""
    parent = os.getppid()
    options = _options(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        if options.die_with_parent:
            follow_parent(parent)
        uvloop.run(serve(_load(options.config, options.replica)))
    except (ValueError, OSError, WarmrouteError) as error:
        print(f"replica {options.replica}: {error}", file=sys.stderr)
        return 1
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="replica.server", description="One engine replica.")
    parser.add_argument("--config", type=Path, required=True, help="the cluster file (TOML)")
    parser.add_argument("--replica", required=True, help="which replica of the file this is")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the parent ends")
    return parser.parse_args(argv)


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


def _load(config: Path, replica_id: str) -> Parts:
    """Everything that needs no event loop. Raises ValueError or OSError with a clear message."""
    cluster = load_cluster(config)
    replica = replica_of(cluster, check_id(replica_id))
    parse_secret(cluster.secret)
    check_mutual(cluster.link_tls)
    tls = server_context(cluster.link_tls) if cluster.link_tls is not None else None
    with contextlib.ExitStack() as undo:
        door = undo.enter_context(bind(replica.host, replica.port))
        path = model_path(cluster, replica)
        _say(f"model    reading {path}")
        card = load_card(path)
        adapters = _adapters(cluster, replica, card)
        _say(f"runner   loading weights for {replica.device}")
        layout, runner, mover = _build(card, replica, adapters)
        undo.pop_all()
    boots = config.parent / BOOT_FOLDER
    bank = runner.adapters
    return Parts(cluster, replica, card, adapters, layout, runner, bank, mover, door, tls, boots)


def _adapters(
    cluster: ClusterConfig, replica: ReplicaConfig, card: ModelCard
) -> dict[str, AdapterCard]:
    """Raises ModelError: what can't be loaded is told now, not to the first request."""
    found = {}
    for name, folder in adapter_paths(cluster, replica).items():
        _say(f"adapter  reading {folder}")
        found[name] = adapter_card(name, folder, card.shape)
    return found


def _build(
    card: ModelCard, replica: ReplicaConfig, adapters: Mapping[str, AdapterCard]
) -> tuple[KVLayout, ModelRunner, BlockMover]:
    # Late: whoever only asks for --help, or has a bad file, need not wait for torch.
    from replica.runner.build import build_runner, kv_layout

    try:
        layout, runner = kv_layout(card, replica), build_runner(card, replica, adapters)
        return layout, runner, runner.mover(Layout.of(layout))
    except RuntimeError as error:
        raise ConfigError(f"the model can't be set up: {str(error).splitlines()[0]}") from error


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that doesn't listen yet. Raises OSError that names the address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            door = undo.enter_context(socket.socket(family, kind))
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
            undo.pop_all()
    except OSError as error:
        raise OSError(f"{host}:{port} can't be used: {error.strerror or error}") from error
    return door


def hello_of(parts: Parts) -> ReplicaHello:
    """What the replica says about itself on the bus."""
    card, replica = parts.card, parts.replica
    return ReplicaHello(
        model=parts.cluster.model.name,
        weights=card.weights_fingerprint,
        tokenizer=card.tokenizer_fingerprint,
        template=card.template_fingerprint,
        layout=parts.layout,
        hash_version=HASH_VERSION,
        key_id=key_id(parse_secret(parts.cluster.secret)),
        digest=DigestShape(bits=replica.digest_bits, k=replica.digest_k),
        link_url=parts.link_url,
        context_tokens=parts.context_tokens,
        total_blocks=parts.runner.total_blocks,
        max_running=replica.max_running,
        device=replica.device,
        version=_version(),
        max_step_tokens=replica.max_step_tokens,
        abilities=(GRAMMAR,),
        role=replica.role,
        adapters=tuple(
            AdapterNote(of.name, of.digest, resident=False, load_ms=of.read_ms)
            for of in parts.adapters.values()
        ),
        itl_target_ms=replica.itl_target_ms,
    )


def with_tiers(hello: ReplicaHello, tiers: ReplicaTiers) -> ReplicaHello:
    """The hello of a replica whose digest shows the tiers below its device too."""
    digest = msgspec.structs.replace(hello.digest, columns=1 + len(tiers.names))
    return msgspec.structs.replace(hello, digest=digest, tiers=tiers.names)


def _version() -> str:
    try:
        return metadata.version("warmroute")
    except metadata.PackageNotFoundError:
        return "unknown"


def _served(parts: Parts, hello: ReplicaHello) -> Served:
    card = parts.card
    return Served(
        limits=Limits(
            hello.model,
            card.shape.vocab,
            parts.context_tokens,
            {note.name: note.digest for note in hello.adapters},
        ),
        vocabulary=card.tokenizer,
        eos_ids=card.eos_ids,
        cluster_key=parse_secret(parts.cluster.secret),
        namespace=Namespace.of_hello(hello),
        mailbox_bytes=parts.replica.mailbox_bytes,
        mailboxes_bytes=parts.replica.mailboxes_bytes,
        compiler=GrammarCompiler(card.tokenizer, card.eos_ids),
    )


class StopRequest:
    """SIGTERM or SIGINT: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def serve(parts: Parts) -> None:
    """Serve until asked to stop. Raises WarmrouteError when the replica can't start or go on."""
    stop = StopRequest()
    secret = parse_secret(parts.cluster.secret)
    hello = hello_of(parts)
    async with contextlib.AsyncExitStack() as ending:
        queue = StepQueue(asyncio.get_running_loop())
        tiers = build_tiers(parts.cluster.kv, secret, Namespace.of_hello(hello), parts.mover)
        if tiers is not None:
            hello = with_tiers(hello, tiers)
        engine = EngineThread(
            parts.runner, queue, parts.replica, secret, tiers=tiers, adapters=parts.bank
        )
        if parts.replica.kv_events:
            telling = _tell_others(engine, parts)
            ending.push_async_callback(telling.close)
            await telling.start()
        engine.start()
        ending.push_async_callback(asyncio.to_thread, engine.close, CLOSE_S)

        cluster, replica_id = parts.cluster.cluster, parts.replica.id
        _say(f"bus      joining {parts.cluster.bus.url}")
        bus = await join(parts.cluster.bus, replica_id)
        ending.push_async_callback(bus.close)
        boot = await claim_boot(bus, cluster, replica_id, parts.state_folder)

        link = LinkSettings(replica=replica_id, boot=boot, secret=link_secret(secret))
        front = build_front(engine, queue, _served(parts, hello), link, Patience())
        if tiers is not None:
            front.expose(TierMetrics(tiers))
        runner = front.runner()
        ending.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.SockSite(runner, parts.door, ssl_context=parts.tls).start()

        publisher = Publisher(
            *(bus, cluster, replica_id, hello, engine, parts.replica, boot),
            tiers=tiers,
            secret=secret,
        )
        ending.push_async_callback(publisher.close)
        await publisher.start()
        settle_memory()
        print(f"READY {parts.url}", flush=True)
        await _until_stopped(front, publisher, stop)
        await drain(front, publisher, stop, parts.replica.drain_s)


def _tell_others(engine: EngineThread, parts: Parts) -> KvEventPublisher:
    """The cache's changes in vLLM's format, from the first one on. Raises ConfigError."""
    # Late: pyzmq is an extra, and few publish.
    try:
        from replica.kv_events.publisher import KvEventPublisher
    except ModuleNotFoundError:
        raise ConfigError("kv_events needs pyzmq: pip install -e '.[bridge]'") from None
    from replica.kv_events.log import KvEventLog

    changes = KvEventLog(parts.replica.block_tokens)
    engine.scheduler.cache.watcher = changes
    replica = parts.replica
    return KvEventPublisher(changes, replica.kv_events, replica.kv_events_replay)


async def _until_stopped(front: FrontApp, publisher: Publisher, stop: StopRequest) -> None:
    """Watch until asked to stop. Raises ReplicaLostError when there is nothing left to watch."""
    while not stop.asked.is_set():
        if not front.front.engine.load().alive:
            raise ReplicaLostError("the engine has died")
        if publisher.superseded:
            raise ReplicaLostError("another process has taken this replica id")
        if not front.healthy:
            log.error("the engine has work and makes no progress")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await stop.asked.wait()


async def drain(
    front: FrontApp, publisher: Publisher, stop: StopRequest, patience_s: float
) -> None:
    """Refuse new requests, tell the routers, let the streams finish; send away those that don't."""
    front.front.intake.draining = True
    publisher.set_draining(True)
    attempts = front.front.attempts
    _say(f"drain    {len(attempts)} requests, at most {patience_s:g} s")
    finished = asyncio.create_task(attempts.drained())
    hurried = asyncio.create_task(stop.hurried.wait())
    await asyncio.wait({finished, hurried}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    finished.cancel()
    hurried.cancel()
    if len(attempts):
        _say(f"drain    {len(attempts)} requests are sent away")
        attempts.send_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await attempts.drained()


if __name__ == "__main__":
    sys.exit(main())
