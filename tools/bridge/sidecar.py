"""The bridge of one backend: each life of the engine is one life of a publisher on the bus.

Where the connection to the engine breaks, or its numbers begin anew, the life is over: the routers
hear a bye, and a larger boot when the engine is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from configs.model.card import ModelCard
from configs.schema import ClusterConfig, ReplicaConfig
from events.bus import Bus
from events.cache import CacheFact
from events.load import DecodeFit, DigestShape, PrefillFit, ReplicaHello
from events.secrets import parse_secret
from kvstore.identity import Namespace
from replica.boot import claim_boot
from replica.cache.journal import Journal
from replica.engine.messages import EngineLoad
from replica.publish import Publisher
from router.backends.roster import Backend, hello_of
from router.tenancy.tenants import ANONYMOUS, scope_salt
from tools.bridge.cache import EngineCache
from tools.bridge.discover import UnreachableError
from tools.bridge.follow import Follower
from tools.bridge.source import Endpoints, EngineGoneError, EventSource
from tools.errors import CommandError

log = logging.getLogger(__name__)

RETRY_S = 1.0
SILENT_S = 10.0
WATCH_S = 1.0
MAX_OPEN_SCOPES = 64
"""Scopes that count as holders of an unsalted block."""

Locate = Callable[[], Awaitable[Endpoints]]
"""Where the engine publishes. Raises UnreachableError while it does not answer."""


@dataclass(frozen=True, slots=True)
class View:
    """What replica.publish reads of an engine, of one that is elsewhere."""

    cache: EngineCache
    journal: Journal
    total_blocks: int

    def drain_facts(self) -> list[CacheFact]:
        """Changes since the last call."""
        return self.journal.drain()

    def load(self) -> EngineLoad:
        """Blocks only: the router knows better what it has in flight there, and how fast it is."""
        cached = min(len(self.cache), self.total_blocks)
        return EngineLoad(
            waiting=0,
            running=0,
            queued_prefill_tokens=0,
            running_context_tokens=0,
            free_blocks=self.total_blocks - cached,
            cached_blocks=cached,
            total_blocks=self.total_blocks,
            step_ms=0.0,
            steps=0,
            prefill=PrefillFit(0.0, 0.0, 0.0, 0.0),
            decode=DecodeFit(0.0, 0.0, 0.0, 0.0),
            seen={},
            prompt_tokens_total=0,
            cached_tokens_total=0,
            preemptions_total=0,
            last_step_s=time.monotonic(),
            alive=True,
        )


class Sidecar:
    """`cache` and `follower` are those of the present life; `lives` counts them."""

    def __init__(
        self,
        cluster: ClusterConfig,
        backend: Backend,
        card: ModelCard,
        bus: Bus,
        locate: Locate,
        state_folder: Path,
    ) -> None:
        self.lives = 0
        self.ready = asyncio.Event()
        self.cache: EngineCache | None = None
        self.follower: Follower | None = None
        self._cluster = cluster
        self._backend = backend
        self._bus = bus
        self._locate = locate
        self._state_folder = state_folder
        self._settings = ReplicaConfig(id=backend.id, block_tokens=backend.config.block_tokens)
        shape = DigestShape(bits=self._settings.digest_bits, k=self._settings.digest_k)
        self._hello: ReplicaHello = hello_of(backend, cluster, card, shape)
        self._salts = open_salts(cluster, backend)

    async def run(self) -> None:
        """One life after the other. Raises WarmrouteError when it makes no sense to go on."""
        while True:
            with contextlib.suppress(UnreachableError):
                async with EventSource(await self._locate()) as source:
                    await self._reach(source)
                    await self._live(source)
                log.info("the engine is gone, or begins anew")
            await asyncio.sleep(RETRY_S)

    async def _reach(self, source: EventSource) -> None:
        """Until the engine's publisher is there; says so where it is not."""
        reached = asyncio.create_task(source.connected())
        try:
            done, _ = await asyncio.wait({reached}, timeout=SILENT_S)
            if not done:
                log.warning("no events yet: does the server publish at %s?", source.address)
            await reached
        finally:
            reached.cancel()

    async def _live(self, source: EventSource) -> None:
        journal, secret = Journal(), parse_secret(self._cluster.secret)
        namespace = Namespace.of_hello(self._hello)
        self.cache = EngineCache(secret, namespace, self._salts, journal)
        self.follower = Follower(source, self.cache)
        await self.follower.catch_up()
        cluster, own_id = self._cluster.cluster, self._backend.id
        boot = await claim_boot(self._bus, cluster, own_id, self._state_folder)
        view = View(self.cache, journal, self._hello.total_blocks)
        publisher = Publisher(self._bus, cluster, own_id, self._hello, view, self._settings, boot)
        await publisher.start()
        self.lives += 1
        self.ready.set()
        try:
            await self._follow(self.follower, publisher)
        finally:
            self.ready.clear()
            await publisher.close("the engine is gone")

    async def _follow(self, follower: Follower, publisher: Publisher) -> None:
        """Until this life is over. Raises CommandError when another bridge has taken the id."""
        following = asyncio.create_task(follower.follow())
        try:
            while not following.done():
                await asyncio.wait({following}, timeout=WATCH_S)
                if publisher.superseded:
                    raise CommandError("another bridge has taken this id")
            with contextlib.suppress(EngineGoneError):
                following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def open_salts(cluster: ClusterConfig, backend: Backend) -> tuple[bytes, ...]:
    """Whose requests hit an unsalted block there: nobody's where the router salts them all, those
    of every scope in the cluster file where it does not."""
    if backend.config.cache_salt:
        return ()
    secret = parse_secret(cluster.secret)
    scopes = {ANONYMOUS: "private"} | {tenant.name: tenant.scope for tenant in cluster.tenants}
    salts = sorted({scope_salt(secret, name, scope) for name, scope in scopes.items()})
    if len(salts) > MAX_OPEN_SCOPES:
        log.warning("only %d of %d cache scopes are told of", MAX_OPEN_SCOPES, len(salts))
    return tuple(salts[:MAX_OPEN_SCOPES])
