"""Starts what is compared on this machine: our gateway over replicas, and peers before as many.

A peer knows nothing of our link: each replica behind it has a gateway of its own, which every peer
finds again. So peers pay for one hop more, and nobody's replicas hold what another's traffic left.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tools.bench.child import Child, until
from tools.bench.live.target import Target
from tools.bench.peers import HOST, PEERS, Before, environ, free_port, home_of
from tools.errors import CommandError
from tools.up.cluster import LocalCluster, Say
from tools.up.options import UpOptions

OURS = "warmroute"
SPLIT = "warmroute-split"
START_S = 180.0
ENGINES = frozenset({"vllm"})
"""These compute by themselves: nothing stands behind them."""

LISTENERS = frozenset({"dynamo"})
"""These want to be told what each replica's cache holds."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to start; `folder` takes states and logs, `homes` are folders of installed peers. With
    `roles`, also ours over so many that compute prompts and that answer."""

    ours: bool
    peers: tuple[str, ...]
    homes: tuple[Path, ...]
    replicas: int
    replica_settings: dict[str, object]
    model: Path
    model_name: str
    folder: Path
    roles: tuple[int, int] | None = None


@asynccontextmanager
async def started(wanted: Wanted, say: Say) -> AsyncIterator[list[Target]]:
    """Ours first, the peers as they were named. Raises CommandError."""
    absent = [name for name in wanted.peers if not PEERS[name].command(home_of(name, wanted.homes))]
    if absent:
        package = PEERS[absent[0]].package
        raise CommandError(
            f"{absent[0]} is not installed here: pip install {package}, or with --target FOLDER "
            "into a folder that --peers names"
        )
    async with AsyncExitStack() as stack:
        targets = []
        if wanted.ours:
            about = f"this gateway over {wanted.replicas} replicas"
            options = _options(wanted, OURS, wanted.replicas)
            targets.append(await _ours(stack, options, about, say))
        if wanted.roles is not None:
            prefill, decode = wanted.roles
            about = f"this gateway over {prefill} replicas for prefill and {decode} for decode"
            options = replace(_options(wanted, SPLIT, 0), prefill=prefill, decode=decode)
            targets.append(await _ours(stack, options, about, say))
        gateways = [name for name in wanted.peers if name not in ENGINES]
        before = await _singles(stack, wanted, say) if gateways else _before(wanted)
        for name in wanted.peers:
            targets.append(await _peer(stack, name, wanted, before, say))
        yield targets


async def _ours(stack: AsyncExitStack, options: UpOptions, about: str, say: Say) -> Target:
    name = options.cluster
    cluster = LocalCluster(options, _named(name, say))
    await stack.enter_async_context(cluster)
    key, replicas = cluster.state.keys.api_key, options.replicas + options.prefill + options.decode
    return Target(name, cluster.urls[0], key, options.model_name, replicas, about)


def _before(wanted: Wanted, *of_each: Sequence[str]) -> Before:
    """`of_each` server: URL, key, where it tells of its cache."""
    urls, *more = map(tuple, of_each) if of_each else [()]
    return Before(urls, wanted.model_name, wanted.model, wanted.folder, *more)


async def _singles(stack: AsyncExitStack, wanted: Wanted, say: Say) -> Before:
    """Single-replica gateways. Their caches' changes are told only where somebody listens."""
    urls, keys, events = [], [], []
    for number in range(wanted.replicas):
        name = f"single-{number}"
        options = _options(wanted, name, 1)
        if LISTENERS.intersection(wanted.peers):
            events.append(f"ipc://{wanted.folder}/{name}.events")
            told = wanted.replica_settings | {"kv_events": events[-1]}
            options = replace(options, replica_settings=told)
        cluster = LocalCluster(options, _named(name, say))
        await stack.enter_async_context(cluster)
        urls.append(cluster.urls[0])
        keys.append(cluster.state.keys.api_key)
    return _before(wanted, urls, keys, events)


def _options(wanted: Wanted, name: str, replicas: int) -> UpOptions:
    return UpOptions(
        state=wanted.folder / name,
        model=wanted.model,
        model_name=wanted.model_name,
        cluster=name,
        port=0,
        replicas=replicas,
        replica_settings=wanted.replica_settings,
    )


def _named(name: str, say: Say) -> Say:
    return lambda line: say(f"{name}: {line}")


async def _peer(
    stack: AsyncExitStack, name: str, wanted: Wanted, before: Before, say: Say
) -> Target:
    peer, port, home = PEERS[name], free_port(), home_of(name, wanted.homes)
    flags = peer.flags(port, before)
    log = wanted.folder / f"{name}.log"
    command = [*(peer.command(home) or []), *flags]
    child = stack.enter_context(Child(command, None, log, environ(home)))
    say(f"{name}: starting")
    try:
        await asyncio.to_thread(
            until, lambda: _answers(port) or not child.running, START_S, f"{name} did not answer"
        )
    except CommandError as error:
        raise CommandError(f"{error}: {child.said()}") from None
    if not child.running:
        raise CommandError(f"{name} ended: {child.said()}")
    about = f"{name} {peer.version(home)}: {' '.join(flags)}"
    return Target(name, f"http://{HOST}:{port}", "", wanted.model_name, wanted.replicas, about)


def _answers(port: int) -> bool:
    """A gateway that names its models has found its servers."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=2) as answer:
            return bool(json.load(answer)["data"])
    except (OSError, ValueError, LookupError):
        return False
