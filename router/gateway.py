"""One gateway, whole: made from its settings, model card and bus; started and stopped in order."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from configs.model.card import ModelCard
from configs.schema import ClusterConfig
from events.bus import Bus
from events.feed import Feed
from events.kv import bucket_of
from events.secrets import link_secret, parse_secret, registry_key
from events.subjects import router_boot_name
from events.tls import check_mutual, client_context, server_context
from router.app import build_app
from router.backends.backends import Backends
from router.choice.choose import RouterBrain
from router.cluster.registry import Registry
from router.cluster.seal import Seal
from router.cluster.shared import (
    POLICY,
    PREFIX,
    REVISION,
    SHADOW,
    TENANT,
    PolicySection,
    PrefixSection,
    TenantSection,
)
from router.cluster.sync import PeerSync
from router.cluster.use import SharedUse
from router.dash.server import Dashboard
from router.dispatch.address import AllowList
from router.dispatch.chutes import Chutes, chute_kernels
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget
from router.dispatch.introduction import LinkTarget, RouterIdentity
from router.dispatch.jobs import JobMaker
from router.dispatch.links import Links
from router.dispatch.sending import Sending
from router.dispatch.sink import SinkLimits
from router.fleet.awaited import Awaited
from router.fleet.expected import MAIN, Expectations, Expected
from router.fleet.fleet import Fleet
from router.openai.logprobs import TokenTexts
from router.rendering.render import Renderer
from router.replication.compute import Recompute, Unheard
from router.replication.heat import HeadHeat
from router.replication.pressure import Pressure
from router.replication.replicate import Replicator
from router.revisions.mirror import Mirror
from router.revisions.revisions import Revision, Revisions, Share, ShareSection, check_revisions
from router.services import Services, widest_limits
from router.serving.bodies import Bodies
from router.serving.door import SPARE_CONNECTIONS, Door
from router.split.hand_off import Splitter
from router.split.signals import RoleSignals
from router.telemetry.alarms import Alarms
from router.telemetry.announce import Announcer
from router.telemetry.beacon import Beacon
from router.telemetry.gauges import register_feed
from router.telemetry.listeners import Listeners
from router.telemetry.metrics import Metrics
from router.tenancy.admit import Admitter
from router.tenancy.gate import Gate
from router.tenancy.limits import Limits
from router.tenancy.prefixes import PublicPrefixes
from router.tenancy.shares import WarmShares
from router.tenancy.tags import TenantTags
from router.tenancy.tenants import Tenants
from router.waiting.queue import RequestQueue

RENDER_THREADS = 2
CLOSE_S = 2.0
WARM_S = 1.0
"""Of a machine that has time: where it has none for this process, replicas are slow as well."""
SETTLED_S = 0.25
"""A replica that has just said hello answers a roll call a tenth of a second later than others."""
WARM_POLL_S = 0.01


def _link_tls(config: ClusterConfig) -> ssl.SSLContext | None:
    check_mutual(config.link_tls)
    return None if config.link_tls is None else client_context(config.link_tls)


class Gateway:
    """Owns every part. `services` is what routes and tests look at."""

    def __init__(
        self,
        config: ClusterConfig,
        card: ModelCard,
        bus: Bus,
        revision_cards: Mapping[str, ModelCard] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`revision_cards`: of each of the configured revisions, by name. `adapters`: content
        digests of the configured ones, by name. Raises ValueError on settings that can't be."""
        check_revisions(config.revisions)
        self._adapters = adapters or {}
        self._config = config
        self._revision_cards = revision_cards or {}
        self._executor = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="render")
        self._bus = bus
        self._announcer = Announcer(bus, config.cluster, config.router.id)
        # Should the clock go back over a restart, the others forget the former life in seconds.
        self._boot = time.time_ns() // 1_000_000
        self.services = self._wire(config, card)
        named = [of.id for of in (*config.replicas, *config.backends)]
        self._awaited = Awaited(named, self.services.fleet, time.monotonic)
        self._beacon = Beacon(self.services.fleet, self._announcer.alarm, also=self._look_around)
        self._feed = Feed(bus, config.cluster, self.services.backends.feed)
        of = self.services
        limits, queue, peers = of.admitter.limits, of.admitter.queue, of.brain.peers
        use = SharedUse(of.shares.tags, limits, queue, peers)
        register_feed(of.metrics, self._feed.stats)
        router, quota = config.router.id, of.splitter.quota
        self._sync = PeerSync(bus, config.cluster, router, self._boot, of.brain, use, quota)
        self._dashboard = Dashboard(bus, config.cluster, self.services.gate.check_reader)
        most = config.router.max_connections + SPARE_CONNECTIONS
        self._door = Door(most, config.router.max_body_bytes)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        host, port = self._door.address
        scheme = "http" if self._config.router.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        """Listen, then follow the bus. Raises OSError when the address can't be used."""
        self.app = build_app(self.services, self._door, self._dashboard.routes())
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        router = self._config.router
        tls = server_context(router.tls) if router.tls is not None else None
        await self._door.open(self._runner.server, router.host, router.port, tls)
        await self.services.links.start()
        await self.services.backends.start()
        await self._announcer.start()
        await self._feed.start()
        await self.services.registry.start()
        await self._sync.start()
        await self._dashboard.start()
        await self._beacon.start()
        if router.replicate:
            await self.services.replicator.start()

    def _look_around(self) -> None:
        """Every few seconds."""
        self._awaited.check()
        self._announcer.scale(self.services.scale_signal())

    async def meet_replicas(self, timeout_s: float) -> bool:
        """Until a request could be routed, and as a rule by what the replicas hold: their digests
        are waited for, but never long. False when nobody comes in time."""
        met = (self.services.links.wait_up(timeout_s), self.services.backends.wait_up())
        waiting = [asyncio.create_task(wait) for wait in met]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self._settled()
        return self.services.reachable > 0

    async def _settled(self) -> None:
        """Until all who came are known whole, and for a moment nobody new has come. Counted in
        looks: they come as often as the machine has time for this process."""
        fleet = self.services.fleet
        roster, quiet = fleet.roster_version, 0
        for _ in range(round(WARM_S / WARM_POLL_S)):
            if fleet.warm and quiet >= SETTLED_S / WARM_POLL_S:
                break
            await asyncio.sleep(WARM_POLL_S)
            quiet += 1
            if roster != fleet.roster_version:
                roster, quiet = fleet.roster_version, 0

    async def drain(self) -> None:
        """Say not-ready, then let what is inside finish, within the configured time."""
        self.services.lifecycle.draining = True
        await self.services.replicator.close()
        await self.services.mirror.close()
        await self.services.gate.wait_idle(self._config.router.drain_s)

    async def close(self) -> None:
        """End everything, last comers first."""
        await self.services.replicator.close()
        await self.services.mirror.close()
        await self._beacon.close()
        await self._dashboard.close()
        await self._door.close(CLOSE_S)
        if self._runner is not None:
            await self._runner.cleanup()
        await self._sync.close()
        await self.services.registry.close()
        await self._feed.close()
        await self.services.backends.close()
        await self.services.links.close()
        await self._announcer.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _wire(self, config: ClusterConfig, card: ModelCard) -> Services:
        router, cluster_key = config.router, parse_secret(config.secret)
        fleet = Fleet(self._expectations(card), time.monotonic)
        brain = RouterBrain(
            fleet,
            router,
            time.monotonic,
            random.Random(),
            on_decision=self._announcer.decided,
            on_outcome=self._announcer.ended,
            router_boot=router_boot_name(router.id, self._boot),
        )
        metrics, kernels = Metrics(), chute_kernels()
        identity = RouterIdentity(router.id, brain.router_boot, link_secret(cluster_key))
        links = Links(
            lambda: [LinkTarget(name, *target) for name, target in fleet.targets().items()],
            AllowList.of(config),
            identity,
            fleet.link_state,
            _link_tls(config),
            fleet.link_stalled,
            lambda: None if kernels is None else Chutes(kernels, metrics.gaps),
        )
        tenants, prefixes = Tenants(cluster_key, config.tenants), PublicPrefixes(cluster_key)
        gate = Gate(router, tenants)
        backends = Backends(config, card, fleet, metrics)
        admitter = Admitter(gate, Limits(), RequestQueue(brain, router))
        registry = self._registry(fleet.alarms)
        registry.add(TENANT, TenantSection(tenants, config.tenants, admitter.limits.forget))
        registry.add(PREFIX, PrefixSection(prefixes))
        registry.add(POLICY, PolicySection(brain.set_policy, router.policy))
        registry.add(SHADOW, PolicySection(brain.shadow.set_policy, router.shadow_policy))
        shares = WarmShares(fleet, TenantTags(cluster_key, tenants))
        listener = Listeners(metrics, (admitter.limits.tallies.ended, shares.ended))
        limits = SinkLimits(router.stream_buffer_bytes, router.slow_reader_s)
        jobs = JobMaker(fleet, prefixes, cluster_key, config.model.name, router, self._adapters)
        background = Dispatcher(brain, links, brain.router_boot, limits, Unheard())
        mover = Recompute(fleet, tenants, jobs, background)
        heat, pressure = HeadHeat(time.monotonic), Pressure(fleet)
        watchers = [pressure.note, admitter.queue.placed]
        watchers += [heat.note] if router.replicate else []
        splitter = Splitter(brain, background, router)
        sending = Sending(brain, links, limits, listener, backends.seats.keys(), watchers, splitter)
        renderer, texts = Renderer(card, self._executor), TokenTexts(card.tokenizer)
        widest = widest_limits(config, card, self._adapters)
        main = sending.revision(MAIN, card, renderer, texts, widest)
        revisions = Revisions(main, self._revisions(sending), fleet)
        registry.add(REVISION, ShareSection(revisions, config.revisions))
        return Services(
            config=config,
            card=card,
            fleet=fleet,
            brain=brain,
            links=links,
            backends=backends,
            tenants=tenants,
            gate=gate,
            bodies=Bodies(router.max_reading_bytes),
            admitter=admitter,
            shares=shares,
            registry=registry,
            prefixes=prefixes,
            renderer=renderer,
            texts=texts,
            widest=widest,
            jobs=jobs,
            dispatcher=main.dispatcher,
            budget=RetryBudget(),
            metrics=metrics,
            pressure=pressure,
            splitter=splitter,
            signals=RoleSignals(fleet, splitter),
            replicator=Replicator(brain, heat, mover, router.replicate_share),
            revisions=revisions,
            mirror=Mirror(revisions),
        )

    def _expectations(self, card: ModelCard) -> Expectations:
        """Raises ValueError where two revisions can't be told apart."""
        cards = {MAIN: card, **self._revision_cards}
        expected = {name: Expected.of(of, self._config) for name, of in cards.items()}
        if len(set(expected.values())) < len(expected):
            raise ValueError("two revisions have the same weights, tokenizer and chat template")
        del expected[MAIN]
        return Expectations(Expected.of(card, self._config, self._adapters), expected)

    def _revisions(self, sending: Sending) -> list[Revision]:
        config, made = self._config, []
        for of in config.revisions:
            card = self._revision_cards[of.name]
            renderer, texts = Renderer(card, self._executor), TokenTexts(card.tokenizer)
            revision = sending.revision(of.name, card, renderer, texts, widest_limits(config, card))
            revision.bounds, revision.share = of, Share(of.weight, of.mirror)
            made.append(revision)
        return made

    def _registry(self, alarms: Alarms) -> Registry:
        config = self._config
        seal = Seal(registry_key(parse_secret(config.secret)))
        return Registry(self._bus, bucket_of(config.cluster), seal, alarms, config.router.id)
