"""Several gateways over one real nats-server and the same replicas; each replica is scripted on its
link and real on the bus."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec import structs

from configs.model.card import ModelCard
from configs.schema import ClusterConfig, ModelConfig, ReplicaConfig, RouterConfig
from events.nats import NatsBus, connect
from events.secrets import link_secret
from events.server import EmbeddedNats
from replica.publish import Publisher
from router.choice.reserve import Ledger
from router.cluster.peers import Peers
from router.fleet.fleet import Fleet
from router.gateway import Gateway
from tests.events.helpers import ListEngine
from tests.fakes.replica import DIGEST, FakeReplica
from tests.router.gateway.house import ADMIN_KEY, SECRET
from tests.waiting import until

KEY = bytes.fromhex(SECRET)


class Street:
    """Use as an async context manager. `engines` say what the replicas publish."""

    def __init__(
        self, card: ModelCard, folder: Path, replicas: int, routers: int = 2, **settings: Any
    ) -> None:
        self.settings = settings
        self.card = card
        self.names = tuple(f"r{number}" for number in range(replicas))
        self.router_ids = tuple(f"router-{number}" for number in range(routers))
        known = self.router_ids or ("router-0",)
        self.nats = EmbeddedNats(folder / "nats", "local", self.names, known)
        self.digest = DIGEST
        self.engines = {name: ListEngine() for name in self.names}
        self.fakes: dict[str, FakeReplica] = {}
        self.gateways: list[Gateway] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Street:
        try:
            await self.nats.start()
            self._stack.push_async_callback(self.nats.stop)
            for name in self.names:
                await self._replica(name)
            for router in self.router_ids:
                self.gateways.append(await self.gateway(router, **self.settings))
            await self.met()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def gateway(self, router: str, **settings: Any) -> Gateway:
        """One more gateway; closed with the street."""
        config = self.config(router, **settings)
        bus = await self._connect(self.nats.router(router))
        gateway = Gateway(config, self.card, bus)
        await gateway.start()
        self._stack.push_async_callback(gateway.close)
        return gateway

    def config(self, router: str, **settings: Any) -> ClusterConfig:
        admin = hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
        return ClusterConfig(
            secret=SECRET,
            model=ModelConfig(path=str(self.card.path), name="tiny"),
            router=RouterConfig(
                id=router,
                port=0,
                admin_key_sha256=admin,
                **({"prefill_ahead_ms": 8e7} | settings),
            ),
        )

    async def met(self) -> None:
        """Until every router has its links and all reports, and has heard the others whole."""
        for gateway in self.gateways:
            links, peers = gateway.services.links, gateway.services.brain.peers
            await until(lambda links=links: len(links.up()) == len(self.names))
            await until(lambda peers=peers: self._whole(peers))
            fleet = gateway.services.fleet
            await until(lambda fleet=fleet: fleet.warm and self._reported(fleet))

    def _reported(self, fleet: Fleet) -> bool:
        members = [fleet.member(name) for name in self.names]
        return all(member is not None and member.load is not None for member in members)

    def _whole(self, peers: Peers) -> bool:
        views = peers.views(0.0)
        return len(views) == len(self.gateways) - 1 and all(view.whole for view in views)

    async def synced(self) -> None:
        """Until each router counts what all the others have open and no report shows."""
        brains = [gateway.services.brain for gateway in self.gateways]
        for brain in brains:
            others = [other.ledger for other in brains if other is not brain]
            await until(lambda of=brain, others=others: of.peers.open == _unseen(others))

    def say(self, name: str, **changes: Any) -> None:
        """What the replica's next heartbeat tells."""
        engine = self.engines[name]
        engine.now = dataclasses.replace(engine.now, **changes)

    async def _replica(self, name: str) -> None:
        bus = await self._connect(self.nats.replica(name))
        fake = FakeReplica(name, secret=link_secret(KEY), cluster_key=KEY, model=self.card)
        await self._stack.enter_async_context(fake)
        self.fakes[name] = fake
        config = ReplicaConfig(id=name, heartbeat_ms=50.0, hello_ms=200.0)
        engine = self.engines[name]
        hello = structs.replace(fake.hello(), digest=self.digest)
        publisher = Publisher(bus, "local", name, hello, engine, config, fake.boot)
        await publisher.start()
        self._stack.push_async_callback(publisher.close)

    async def _connect(self, user: Any) -> NatsBus:
        bus = await connect(user.url, user.user, user.password, user.user)
        self._stack.push_async_callback(bus.close)
        return bus


def _unseen(ledgers: list[Ledger]) -> int:
    return sum(len(ledger.unseen()) for ledger in ledgers)
