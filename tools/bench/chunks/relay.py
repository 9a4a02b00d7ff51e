"""The whole path: a real gateway in this process, its replica and clients in another one.

CPU time is this process's; what the kernel does for its sockets is the system part of it.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from configs.model.card import ModelCard
from configs.schema import ClusterConfig, ModelConfig, ReplicaConfig, RouterConfig
from events.digest import DigestShape
from events.garbage import settle_memory
from events.load import DecodeFit, PrefillFit, ReplicaHello, silent_load
from events.memory import MemoryBus
from router.gateway import Gateway
from tools.bench.chunks import peer
from tools.bench.gateway.replicas import hello_of

_SECRET = "11" * 32
_BOOT = 1
_SHAPE = DigestShape(bits=65_536, k=8)
_PROBE_S = 0.005
_CHUNK_BYTES = 270
_FLOOR_SENDS = 50_000


def _hello(card: ModelCard, port: int) -> ReplicaHello:
    """As many as the benchmark asks for may run at once."""
    hello = hello_of(card, _config(card), ReplicaConfig(id=peer.REPLICA, port=port))
    return msgspec.structs.replace(hello, digest=_SHAPE, max_running=1 << 12)


_LOAD = msgspec.structs.replace(
    silent_load(1 << 16),
    digest_generation=1,
    digest_seq=0,
    step_ms=1.0,
    prefill=PrefillFit(1.0, 1.0, 0.0, 1.0),
    decode=DecodeFit(1.0, 0.1, 0.0, 1.0),
    engine_steps=1,
)


def _config(card: ModelCard) -> ClusterConfig:
    return ClusterConfig(
        secret=_SECRET,
        model=ModelConfig(path=str(card.path), name="bench"),
        router=RouterConfig(port=0, max_connections=8_000, max_inflight_tokens=1 << 30),
    )


async def _announce(gateway: Gateway, card: ModelCard, port: int) -> None:
    """Hello and heartbeats as the bus would bring them, for ever."""
    fleet = gateway.services.fleet
    fleet.on_hello(peer.REPLICA, _BOOT, _hello(card, port))
    bits = np.zeros(_SHAPE.bits // 8, dtype=np.uint8)
    fleet.on_digest_reset(peer.REPLICA, _BOOT, 1, 0, _SHAPE, bits)
    while True:
        fleet.on_load(peer.REPLICA, _BOOT, _LOAD)
        await asyncio.sleep(0.25)


async def _watch_lag(lags_s: list[float]) -> None:
    """How much later than asked for the loop comes back, over and over."""
    while True:
        wanted_s = time.perf_counter() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        lags_s.append(max(0.0, time.perf_counter() - wanted_s))


def probe_ready(words: Connection, port: int) -> None:
    """A process: asks /ready every 20 ms until told to stop, then says how long each took."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    took_s: list[float] = []
    words.send("here")
    while not words.poll(0.02):
        started_s = time.perf_counter()
        connection.request("GET", "/ready")
        connection.getresponse().read()
        took_s.append(time.perf_counter() - started_s)
    words.send(took_s)


_CPUS = sorted(range(os.cpu_count() or 1))
"""The gateway gets the first; whatever else runs gets the others, where there are any."""


def _elsewhere(words: Connection, target: Callable[..., None], *args: object) -> None:
    """A child's main."""
    os.sched_setaffinity(0, _CPUS[1:] or _CPUS)
    target(words, *args)


class _Child:
    """A spawned process and the pipe to it; use as a context manager."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.words, theirs = context.Pipe()
        given = (theirs, target, *args)
        self._process = context.Process(target=_elsewhere, args=given, daemon=True)

    def __enter__(self) -> _Child:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    async def hear(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.words.recv)

    async def tell(self, *word: object) -> Any:
        """Tell it to do something; what it says when that is done."""
        self.words.send(word)
        return await self.hear()


def _quantile_ms(values_s: list[float], q: float) -> float:
    return round(1000 * float(np.quantile(values_s or [0.0], q)), 2)


async def _cost(other: _Child, deltas: int, *how: float) -> dict[str, float]:
    """CPU of this process while the peer relays."""
    before, started_s = os.times(), time.perf_counter()
    events = await other.tell("relay", *how)
    took_s, after = time.perf_counter() - started_s, os.times()
    user_s, system_s = after.user - before.user, after.system - before.system
    return {
        "events_per_delta": round(events / deltas, 3),
        "deltas_per_s": round(deltas / took_s),
        "cpu_us": round(1e6 * (user_s + system_s) / deltas, 2),
        "user_us": round(1e6 * user_s / deltas, 2),
        "system_us": round(1e6 * system_s / deltas, 2),
        "busy": round((user_s + system_s) / took_s, 2),
    }


async def _floor_us(other: _Child, streams: int) -> float:
    """CPU of one plain send of such a chunk to each of as many sockets: no gateway costs less."""
    port, chunk = await other.tell("swallow"), b"x" * _CHUNK_BYTES
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    rounds = max(1, _FLOOR_SENDS // streams)
    started_s = time.process_time()
    for _ in range(rounds):
        for each in sockets:
            each.send(chunk)
    took_s = time.process_time() - started_s
    for each in sockets:
        each.close()
    return round(1e6 * took_s / rounds / streams, 2)


async def _delays(other: _Child, port: int, *how: float) -> dict[str, float]:
    """How late timers fire, and how long /ready takes, while the peer relays."""
    lags_s: list[float] = []
    with _Child(probe_ready, port) as probe:
        await probe.hear()
        watch = asyncio.create_task(_watch_lag(lags_s))
        await other.tell("relay", *how)
        watch.cancel()
        ready_s = await probe.tell("stop")
    return {
        "lag_p50_ms": _quantile_ms(lags_s, 0.5),
        "lag_p99_ms": _quantile_ms(lags_s, 0.99),
        "lag_max_ms": _quantile_ms(lags_s, 1.0),
        "ready_p50_ms": _quantile_ms(ready_s, 0.5),
        "ready_max_ms": _quantile_ms(ready_s, 1.0),
    }


def _allow_files(streams: int) -> None:
    """Two sockets for each stream at most, here and in the children, as far as the system lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * streams + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def relay(card: ModelCard, streams: int, steps: int, per_s: float) -> dict[str, float]:
    """`steps` deltas to each of `streams`, `per_s` a second each (0: as fast as they are read).

    Done twice: once for the costs, once with the probes, which cost time themselves.
    """
    _allow_files(streams)
    os.sched_setaffinity(0, _CPUS[:1])
    gateway = Gateway(_config(card), card, MemoryBus())
    await gateway.start()
    how = (steps, 1 / per_s if per_s else 0.0)
    with _Child(peer.run, streams, _BOOT) as other:
        heart = asyncio.create_task(_announce(gateway, card, int(await other.hear())))
        try:
            await gateway.meet_replicas(10.0)
            settle_memory()  # as the gateway's process does
            port = int(gateway.url.rpartition(":")[2])
            await other.tell("open", port)
            costs = await _cost(other, streams * steps, *how)
            costs["plain_send_us"] = await _floor_us(other, streams)
            delays = await _delays(other, port, *how)
            await other.tell("close")
        finally:
            heart.cancel()
            await gateway.close()
    return {"streams": streams, **costs, **delays}
