"""`warmroute bench bus`: what the bus costs.

CPU time, so that a busy machine doesn't count: the publisher's tick, the feed's work per delta and
a snapshot. A change is one key that came or went. No sockets, but for the last line, which is both
ends and their clients in this process against a real nats-server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from configs.schema import ReplicaConfig
from events.bus import Bus
from events.cache import CacheFact, CacheOp
from events.feed import Feed
from events.load import (
    DecodeFit,
    DigestShape,
    KVLayout,
    PrefillFit,
    ReplicaHello,
    ReplicaLoad,
)
from events.memory import MemoryBus, MemoryHub
from events.nats import connect
from events.server import EmbeddedNats
from events.snapshot import FrozenDigest, SnapshotAssembly, chunk_count
from replica.engine.messages import Engine, EngineLoad
from replica.publish import Publisher

CLUSTER, REPLICA = "bench", "r0"
SHAPE = DigestShape(bits=1 << 16, k=8)
LOAD = EngineLoad(
    waiting=0,
    running=1,
    queued_prefill_tokens=0,
    running_context_tokens=0,
    free_blocks=0,
    cached_blocks=2_000,
    total_blocks=4_096,
    step_ms=1.0,
    steps=1,
    prefill=PrefillFit(1.0, 0.1, 0.0, 1.0),
    decode=DecodeFit(1.0, 0.1, 0.0, 1.0),
    seen={},
    prompt_tokens_total=0,
    cached_tokens_total=0,
    preemptions_total=0,
    last_step_s=0.0,
    alive=True,
)
RESIDENT = 2_000
BATCHES = (0, 1, 20, 200)
HELLO = ReplicaHello(
    model="bench",
    weights="w",
    tokenizer="t",
    template="c",
    layout=KVLayout(
        dtype="bfloat16", layers=1, kv_heads=1, head_dim=1, block_tokens=16, rope="none"
    ),
    hash_version="wr-block-1",
    key_id="k",
    digest=SHAPE,
    link_url="ws://127.0.0.1:1/link",
    context_tokens=1 << 20,
    total_blocks=4_096,
    max_running=64,
    device="cpu",
    version="bench",
)


class Churn:
    """An engine with a full cache; `advance` replaces `batch` keys of it."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._rng = random.Random(1)
        self._keys = [self._rng.randbytes(16) for _ in range(RESIDENT)]
        self._facts = [CacheFact(CacheOp.STORED, key) for key in self._keys]

    def advance(self) -> None:
        """Evict the oldest, store new ones."""
        new = [self._rng.randbytes(16) for _ in range(self._batch)]
        old, self._keys = self._keys[: self._batch], self._keys[self._batch :] + new
        self._facts = [CacheFact(CacheOp.REMOVED, key) for key in old]
        self._facts += [CacheFact(CacheOp.STORED, key) for key in new]

    def drain_facts(self) -> list[CacheFact]:
        """What the publisher asks for."""
        facts, self._facts = self._facts, []
        return facts

    def load(self) -> EngineLoad:
        """Always the same."""
        return LOAD


class Reader:
    """A listener that keeps one byte per position, and nothing else."""

    def __init__(self) -> None:
        self.seq = -1
        self._bits = np.zeros(SHAPE.bits, np.uint8)

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        """Not measured."""

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        """Not measured."""

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        """Take the whole digest over."""
        self.seq = seq
        self._bits = np.unpackbits(bits, bitorder="little")

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        """Apply."""
        self.seq = seq
        self._bits[set_positions] = 1
        self._bits[clear_positions] = 0

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        """Not measured."""

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        """Not measured."""


def make_publisher(bus: Bus, engine: Churn) -> Publisher:
    """One that says hello and load once, so that ticks are of the digest alone."""
    config = ReplicaConfig(id=REPLICA, heartbeat_ms=86_400_000.0, hello_ms=86_400_000.0)
    return Publisher(bus, CLUSTER, REPLICA, HELLO, cast(Engine, engine), config, boot=1)


async def tick_us(batch: int, seconds: float) -> float:
    """CPU time of one publisher tick with `batch` keys out and as many in."""
    engine = Churn(batch)
    publisher = make_publisher(MemoryBus(), engine)
    await publisher.tick()
    spent, ticks, end = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        engine.advance()
        begin = time.process_time()
        await publisher.tick()
        spent += time.process_time() - begin
        ticks += 1
    return spent / ticks * 1e6


async def ingest_us(batch: int, seconds: float) -> float:
    """CPU time of one delta in the feed, listener included."""
    hub, engine, reader = MemoryHub(), Churn(batch), Reader()
    publisher, feed = make_publisher(MemoryBus(hub), engine), Feed(MemoryBus(hub), CLUSTER, reader)
    await publisher.start()
    await feed.start()
    await asyncio.sleep(0.2)
    spent, deltas, end = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            engine.advance()
            await publisher.tick()
        begin = time.process_time()
        await asyncio.sleep(0)
        spent += time.process_time() - begin
        deltas += 100
    assert reader.seq == publisher.residency.seq
    await feed.close()
    await publisher.close()
    return spent / deltas * 1e6


def snapshot_us(bits: int) -> tuple[float, float, int]:
    """CPU time to send and to take over a digest at a third of its fill, and its size in bytes."""
    shape = DigestShape(bits=bits, k=8)
    told = np.random.default_rng(1).random(bits) < 0.33
    begin = time.process_time()
    frozen = FrozenDigest.of(1, 1, shape, np.packbits(told, bitorder="little"))
    chunks = [frozen.chunk(index) for index in range(chunk_count(shape))]
    sent = time.process_time()
    assembly = SnapshotAssembly()
    for chunk in chunks:
        assembly.add(chunk)
    taken = time.process_time()
    return (sent - begin) * 1e6, (taken - sent) * 1e6, sum(len(chunk.data) for chunk in chunks)


async def wire_rate(batch: int, seconds: float) -> tuple[float, float]:
    """(deltas/s, CPU us per delta) of both ends together over a real server."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder), CLUSTER, (REPLICA,))
        await server.start()
        sides = (server.replica(REPLICA), server.router())
        replica, router = [await connect(one.url, one.user, one.password) for one in sides]
        engine, reader = Churn(batch), Reader()
        publisher, feed = make_publisher(replica, engine), Feed(router, CLUSTER, reader)
        await publisher.start()
        await feed.start()
        cpu, begin, deltas = time.process_time(), time.monotonic(), 0
        while time.monotonic() - begin < seconds or reader.seq != publisher.residency.seq:
            if time.monotonic() - begin < seconds:
                engine.advance()
                await publisher.tick()
                deltas += 1
            await asyncio.sleep(0)
        cpu, wall = time.process_time() - cpu, time.monotonic() - begin
        for end in (feed, publisher, replica, router):
            await end.close()
        await server.stop()
    return deltas / wall, cpu / deltas * 1e6


async def report(seconds: float) -> None:
    """Print everything, line by line."""
    for batch in BATCHES:
        print(f"tick     {batch:4} out {batch:4} in   {await tick_us(batch, seconds):8.1f} us CPU")
    for batch in BATCHES[1:]:
        cost = await ingest_us(batch, seconds)
        rate = 2 * batch / cost * 1e6
        print(f"ingest   {batch:4} out {batch:4} in   {cost:8.1f} us CPU  {rate:12,.0f} changes/s")
    for bits in (1 << 16, 1 << 20, 1 << 23):
        sent, taken, size = snapshot_us(bits)
        print(f"snapshot {bits:9} bits   send {sent:8.0f} us  take {taken:8.0f} us  {size:9} bytes")
    rate, cost = await wire_rate(20, seconds)
    print(f"wire       20 out   20 in   {cost:8.1f} us CPU both ends  {rate:8,.0f} deltas/s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(prog="warmroute bench bus", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    asyncio.run(report(parser.parse_args(arguments).seconds))
