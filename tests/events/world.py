"""One hub, one replica, one router, and a clock that moves only when told to."""

from __future__ import annotations

import numpy as np

from events.feed import Feed
from events.load import DigestShape
from events.memory import MemoryBus, MemoryHub
from replica.publish import Publisher
from tests.events.helpers import (
    CLUSTER,
    Clock,
    ListEngine,
    Mirror,
    MirrorListener,
    config,
    hello,
    settle,
)

WIDE = DigestShape(bits=16_384, k=8)


class World:
    """Everything between a journal and what a reader believes."""

    def __init__(self, shape: DigestShape = WIDE) -> None:
        self.shape = shape
        self.hub = MemoryHub()
        self.clock = Clock()
        self.engine = ListEngine()
        self.history: dict[tuple[int, int, int], np.ndarray] = {}
        self.listener = MirrorListener(check=self.believes_history)
        self.bus = MemoryBus(self.hub)
        self.feed = self.new_feed()
        self.boot = 100
        self.publisher = self.new_publisher()

    def new_feed(self) -> Feed:
        return Feed(self.bus, CLUSTER, self.listener, self.clock)

    def new_publisher(self) -> Publisher:
        self.boot += 1
        bus = MemoryBus(self.hub)
        args = (CLUSTER, "r0", hello(self.shape), self.engine, config(), self.boot, self.clock)
        return Publisher(bus, *args)

    async def serve(self, publisher: Publisher) -> None:
        """Its subscriptions without its loop: the tests beat the time."""
        await publisher.start()
        self.record()
        assert publisher._task
        publisher._task.cancel()
        await settle()

    async def restart(self) -> None:
        """As after kill -9: no bye, an empty cache, a larger boot."""
        await self.publisher._bus.close()
        self.publisher = self.new_publisher()
        await self.serve(self.publisher)
        await self.beat()

    async def beat(self, seconds: float = 0.05) -> None:
        self.clock.now_s += seconds
        await self.publisher.tick()
        self.record()
        await settle()
        await self.feed.sweep()
        await settle()

    async def calm(self) -> None:
        """Longer than any wait of a living replica: heartbeat, hello, backoff."""
        for _ in range(40):
            await self.beat(0.25)

    def truth(self) -> np.ndarray:
        return np.unpackbits(self.publisher.residency.freeze().bits, bitorder="little").astype(bool)

    def record(self) -> None:
        now = self.publisher.residency
        self.history[self.publisher.boot, now.generation, now.seq] = self.truth()

    def believes_history(self, _replica: str, mirror: Mirror) -> bool:
        """What a reader takes for known is the truth of the moment that it names."""
        return bool((mirror.bits == self.history[mirror.where]).all())

    def in_sync(self) -> bool:
        bits = self.listener.bits("r0")
        return bits is not None and bool((bits == self.truth()).all())
