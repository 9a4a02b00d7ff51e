"""Everything the routes need, made once per process and handed to them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from configs.model.card import ModelCard
from configs.schema import ClusterConfig
from events.grammar import GRAMMAR
from events.scale import ScaleSignal
from router.backends.backends import Backends
from router.choice.choose import RouterBrain
from router.cluster.registry import Registry
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget
from router.dispatch.jobs import JobMaker
from router.dispatch.links import Links
from router.fleet.fleet import Fleet
from router.fleet.pool import Pool
from router.openai.limits import limits_of
from router.openai.logprobs import TokenTexts
from router.openai.schema import Limits
from router.rendering.render import Renderer
from router.replication.pressure import Pressure
from router.replication.replicate import Replicator
from router.revisions.mirror import Mirror
from router.revisions.revisions import Revisions
from router.serving.bodies import Bodies
from router.split.hand_off import Splitter
from router.split.signals import RoleSignals
from router.telemetry.metrics import Metrics
from router.tenancy.admit import Admitter
from router.tenancy.gate import Gate
from router.tenancy.prefixes import PublicPrefixes
from router.tenancy.shares import WarmShares
from router.tenancy.tenants import Tenants


@dataclass(slots=True)
class Lifecycle:
    """`draining` flips once, before anything else of the shutdown happens."""

    draining: bool = False


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway. Only `lifecycle` changes."""

    config: ClusterConfig
    card: ModelCard
    fleet: Fleet
    brain: RouterBrain
    links: Links
    backends: Backends
    tenants: Tenants
    gate: Gate
    bodies: Bodies
    admitter: Admitter
    shares: WarmShares
    prefixes: PublicPrefixes
    registry: Registry
    renderer: Renderer
    texts: TokenTexts
    widest: Limits
    jobs: JobMaker
    dispatcher: Dispatcher
    budget: RetryBudget
    metrics: Metrics
    pressure: Pressure
    splitter: Splitter
    signals: RoleSignals
    replicator: Replicator
    revisions: Revisions
    mirror: Mirror
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> bool:
        """Whether a request that comes now could be routed."""
        return not self.lifecycle.draining and bool(self.fleet.pools()) and self.reachable > 0

    @property
    def reachable(self) -> int:
        """Replicas of both kinds that can be asked."""
        return len(self.links.up()) + self.backends.up

    def scale_signal(self) -> ScaleSignal:
        """Whether the fleet is large enough, and each part of it."""
        return self.signals.on(self.pressure.signal())

    def limits(self, pool: Pool | None) -> Limits:
        """What a generating route accepts now."""
        return limits_in(self.widest, pool)


def limits_in(widest: Limits, pool: Pool | None) -> Limits:
    """The smallest context anywhere counts, and what at least one replica can do."""
    if pool is None:
        return widest
    grammars = GRAMMAR in pool.abilities
    if grammars and pool.context_tokens >= widest.context_tokens:
        return widest
    context_tokens = min(pool.context_tokens, widest.context_tokens)
    return replace(widest, context_tokens=context_tokens, grammars=grammars)


def widest_limits(config: ClusterConfig, card: ModelCard, adapters: Iterable[str] = ()) -> Limits:
    """What the configuration alone allows; `adapters` are asked for by their names."""
    contexts = [card.shape.context_tokens]
    contexts += [replica.context_tokens for replica in config.replicas]
    return limits_of(card, (config.model.name, *adapters), min(contexts))
