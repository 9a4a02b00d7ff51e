"""Starts what is compared on this machine: our gateway over replicas, and peers before as many.

A peer knows nothing of our link: each replica behind it has a gateway of its own, which every peer
finds again. So peers pay for one hop more, and nobody's replicas hold what another's traffic left.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.bench.child import Child, until
from tools.bench.live.target import Target
from tools.bench.peers import HOST, PEERS, Before, environ, free_port, missing
from tools.errors import CommandError
from tools.up.cluster import LocalCluster, Say, UpOptions

OURS = "warmroute"
START_S = 180.0
ENGINES = frozenset({"vllm"})
"""These compute by themselves: nothing stands behind them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to start; `folder` takes states and logs, `peers_folder` has installed peers."""

    ours: bool
    peers: tuple[str, ...]
    peers_folder: Path | None
    replicas: int
    replica_settings: Mapping[str, object]
    model: Path
    model_name: str
    folder: Path


@asynccontextmanager
async def started(wanted: Wanted, say: Say) -> AsyncIterator[list[Target]]:
    """Ours first, the peers as they were named. Raises CommandError."""
    if absent := missing(wanted.peers, wanted.peers_folder):
        package = PEERS[absent[0]].package
        raise CommandError(
            f"{absent[0]} is not installed here: pip install {package}, or with --target FOLDER "
            "into a folder that --peers names"
        )
    async with AsyncExitStack() as stack:
        targets = []
        if wanted.ours:
            targets.append(await _ours(stack, wanted, say))
        gateways = [name for name in wanted.peers if name not in ENGINES]
        urls = await _singles(stack, wanted, say) if gateways else ()
        for name in wanted.peers:
            targets.append(await _peer(stack, name, wanted, urls, say))
        yield targets


async def _ours(stack: AsyncExitStack, wanted: Wanted, say: Say) -> Target:
    cluster = _cluster(wanted, OURS, wanted.replicas, say)
    await stack.enter_async_context(cluster)
    about = f"this gateway over {wanted.replicas} replicas"
    model, key = wanted.model_name, cluster.state.keys.api_key
    return Target(OURS, cluster.urls[0], key, model, wanted.replicas, about)


async def _singles(stack: AsyncExitStack, wanted: Wanted, say: Say) -> tuple[str, ...]:
    urls = []
    for number in range(wanted.replicas):
        cluster = _cluster(wanted, f"single-{number}", 1, say)
        await stack.enter_async_context(cluster)
        urls.append(cluster.urls[0])
    return tuple(urls)


def _cluster(wanted: Wanted, name: str, replicas: int, say: Say) -> LocalCluster:
    options = UpOptions(
        state=wanted.folder / name,
        model=wanted.model,
        model_name=wanted.model_name,
        cluster=name,
        port=0,
        replicas=replicas,
        replica_settings=wanted.replica_settings,
    )
    return LocalCluster(options, lambda line: say(f"{name}: {line}"))


async def _peer(
    stack: AsyncExitStack, name: str, wanted: Wanted, urls: Sequence[str], say: Say
) -> Target:
    peer, port = PEERS[name], free_port()
    before = Before(tuple(urls), wanted.model_name, wanted.model, wanted.folder)
    flags = peer.flags(port, before)
    command = [*(peer.command(wanted.peers_folder) or []), *flags]
    log = wanted.folder / f"{name}.log"
    child = stack.enter_context(Child(command, None, log, environ(wanted.peers_folder)))
    say(f"{name}: starting")
    try:
        await asyncio.to_thread(
            until, lambda: _answers(port) or not child.running, START_S, f"{name} did not answer"
        )
    except RuntimeError as error:
        raise CommandError(f"{error}: {_end(child)}") from None
    if not child.running:
        raise CommandError(f"{name} ended: {_end(child)}")
    about = f"{name} {peer.version(wanted.peers_folder)}: {' '.join(flags)}"
    return Target(name, f"http://{HOST}:{port}", "", wanted.model_name, wanted.replicas, about)


def _end(child: Child) -> str:
    return (child.said().strip().splitlines() or ["it said nothing"])[-1]


def _answers(port: int) -> bool:
    """A gateway that names its models has found its servers."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
