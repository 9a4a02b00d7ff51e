"""Any mix of loss, doubling, reordering, restarts, evictions: known is right, and it heals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from events.cache import CacheFact, CacheOp
from events.load import DigestShape
from tests.events.helpers import engine_load, removed, settle, stored
from tests.events.world import World

NARROW = DigestShape(bits=256, k=4)
"""Small enough to outgrow: generations change in the middle of the weather."""

NUMBERS = st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True)


class Weather:
    """Loses, doubles and delays messages at random, from a seed that hypothesis chose."""

    def __init__(self, seed: int, loss: float, twice: float, late: float) -> None:
        self._rng = random.Random(seed)
        self._loss, self._twice, self._late = loss, twice, late

    def __call__(self, _subject: str, _payload: bytes) -> tuple[int, ...]:
        dice = self._rng.random
        if dice() < self._loss:
            return ()
        copies = 2 if dice() < self._twice else 1
        return tuple(self._rng.randint(1, 6) if dice() < self._late else 0 for _ in range(copies))


class E2E5E8Faults(RuleBasedStateMachine):
    """The reader's bits are those of the moment that it stands at, or it knows that it's lost."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.run(self._start())

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(coroutine)

    async def _start(self) -> None:
        self.world = World(NARROW)
        self.resident: set[int] = set()
        await self.world.feed.start()
        await self.world.serve(self.world.publisher)

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        new = [number for number in numbers if number not in self.resident]
        self.world.engine.facts += stored(*new)
        self.resident.update(new)

    @rule(numbers=NUMBERS)
    def evict(self, numbers: list[int]) -> None:
        old = [number for number in numbers if number in self.resident]
        self.world.engine.facts += removed(*old)
        self.resident.difference_update(old)

    @rule()
    def clear(self) -> None:
        self.world.engine.facts.append(CacheFact(CacheOp.CLEARED, b""))
        self.resident.clear()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.25, 1.0, 3.0, 7.0]))
    def beat(self, seconds: float) -> None:
        self.run(self.world.beat(seconds))

    @rule(
        seed=st.integers(0, 1 << 30),
        loss=st.sampled_from([0.0, 0.1, 0.5]),
        twice=st.sampled_from([0.0, 0.5]),
        late=st.sampled_from([0.0, 0.3]),
    )
    def weather(self, seed: int, loss: float, twice: float, late: float) -> None:
        self.world.hub.fault = Weather(seed, loss, twice, late)

    @rule()
    def clear_sky(self) -> None:
        self.world.hub.fault = None

    @rule()
    def late_messages_arrive(self) -> None:
        async def release() -> None:
            self.world.hub.release()
            await settle()

        self.run(release())

    @rule()
    def replica_is_killed_and_restarts(self) -> None:
        self.resident.clear()
        self.world.engine.facts.clear()
        self.run(self.world.restart())

    @rule()
    def router_restarts(self) -> None:
        async def restart() -> None:
            await self.world.feed.close()
            self.world.listener.present.clear()
            self.world.feed = self.world.new_feed()
            await self.world.feed.start()
            await settle()

        self.run(restart())

    @rule(who=st.sampled_from(["router", "replica"]), back=st.booleans())
    def connection_is_cut(self, who: str, back: bool) -> None:
        bus = self.world.bus if who == "router" else self.world.publisher._bus

        async def cut() -> None:
            bus.reconnect() if back else bus.disconnect()  # type: ignore[attr-defined]
            await settle()

        self.run(cut())

    @precondition(lambda self: self.world.bus.connected)
    @rule()
    def slow_consumer(self) -> None:
        async def report() -> None:
            self.world.bus.report_gap("slow_consumer")
            await settle()

        self.run(report())

    @invariant()
    def what_is_believed_was_true(self) -> None:
        assert self.world.listener.broken == []
        assert self.world.bus.handler_failures == 0
        assert self.world.publisher.residency.journal_faults == 0

    def teardown(self) -> None:
        self.run(self._quiesce())
        self.loop.close()

    async def _quiesce(self) -> None:
        world = self.world
        world.hub.fault = None
        world.hub.release()
        world.bus.reconnect()
        world.publisher._bus.reconnect()  # type: ignore[attr-defined]
        world.engine.now = engine_load()
        await world.calm()
        assert len(world.publisher.residency) == len(self.resident)
        assert world.in_sync(), world.feed.states()
        assert world.listener.broken == []
        await world.feed.close()
        await world.publisher.close()


TestE2E5E8Faults = E2E5E8Faults.TestCase
TestE2E5E8Faults.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
