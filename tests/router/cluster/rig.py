"""Routers over a bus that the test carries message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple

from configs.schema import RouterConfig, TenantConfig
from events.bus import Handler
from events.decision import RouteDecision
from events.peer import Sent
from events.subjects import router_boot_name, router_subject
from router.cluster.sync import PeerSync
from router.cluster.use import SharedUse
from router.split.quota import DecodeQuota
from router.tenancy.limits import Limits
from router.tenancy.tags import TenantTags
from router.tenancy.tenants import Tenants
from router.waiting.queue import RequestQueue
from tests.router.kit import KEY, Clock, World


class Wire:
    """The bus as one router sees it: what it says waits in `out` until the test carries it."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.handler: Handler
        self.gap: Callable[[str], None]

    async def publish(self, subject: str, payload: bytes) -> None:
        self.out.append(payload)

    async def subscribe(self, subject: str, handler: Handler) -> Wire:
        self.handler = handler
        return self

    def on_gap(self, listener: Callable[[str], None]) -> None:
        self.gap = listener

    async def close(self) -> None:
        pass


class Router:
    """One life of one router, without tasks of its own."""

    def __init__(self, name: str, boot: int, clock: Clock, boots: dict[str, int]) -> None:
        self.name, self.boot = name, boot
        self.boot_name = router_boot_name(name, boot)
        self.world = World(clock=clock, router_boot=self.boot_name, seed=boot)
        for replica, its_boot in boots.items():
            self.world.join(replica, its_boot)
        self.wire = Wire()
        acme = TenantConfig(name="acme", requests_per_min=60, max_concurrent=1_000)
        self.tenants = Tenants(KEY, [acme])
        self.limits = Limits(clock)
        queue = self.queue = RequestQueue(self.world.brain, RouterConfig())
        brain = self.world.brain
        use = self.use = SharedUse(TenantTags(KEY, self.tenants), self.limits, queue, brain.peers)
        self.acme = self.limits.account(self.tenants.named("acme"))
        self.quota = DecodeQuota(brain.ledger, brain.peers, 0.5)
        self.sync = PeerSync(self.wire, "c", name, boot, brain, use, self.quota, clock)  # type: ignore[arg-type]
        self.open: dict[int, RouteDecision] = {}
        self.early: set[int] = set()
        self.life: dict[int, int] = {}

    def listen(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        await self.sync.start()
        await self.sync.close()

    def hear(self, sender: str, payload: bytes) -> None:
        self.wire.handler(router_subject("c", sender, "peers"), payload)

    def booked(self, replica: str) -> tuple[float, ...]:
        member = self.world.fleet.member(replica)
        self.world.brain.peers.note_seen(replica, member.load.seen)
        *sums, sizes = astuple(self.world.brain.peers.booked(replica))
        return (*sums, *sizes)


def sent(seq: int, replica: str = "r0", boot: int = 1, **changes: object) -> Sent:
    return Sent(seq, replica, boot, 100, 50.0, 120, 7, **changes)  # type: ignore[arg-type]
