"""Everything the routes need, made once per process and handed to them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from configs.model.card import ModelCard
from configs.schema import ClusterConfig
from router.admit import Admitter
from router.backends.backends import Backends
from router.bodies import Bodies
from router.choose import RouterBrain
from router.dispatch import Dispatcher
from router.failover import RetryBudget
from router.fleet import Fleet, Pool
from router.gate import Gate
from router.jobs import JobMaker
from router.links import Links
from router.metrics import Metrics
from router.mirror import Mirror
from router.openai.limits import limits_of
from router.openai.logprobs import TokenTexts
from router.openai.schema import Limits
from router.prefixes import PublicPrefixes
from router.pressure import Pressure
from router.registry import Registry
from router.render import Renderer
from router.replicate import Replicator
from router.revisions import Revisions
from router.shares import WarmShares
from router.tenants import Tenants


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

    def limits(self, pool: Pool | None) -> Limits:
        """What a generating route accepts now."""
        return limits_in(self.widest, pool)


def limits_in(widest: Limits, pool: Pool | None) -> Limits:
    """The smallest context anywhere counts."""
    if pool is None or pool.context_tokens >= widest.context_tokens:
        return widest
    return replace(widest, context_tokens=pool.context_tokens)


def widest_limits(config: ClusterConfig, card: ModelCard) -> Limits:
    """What the configuration alone allows."""
    contexts = [card.shape.context_tokens]
    contexts += [replica.context_tokens for replica in config.replicas]
    return limits_of(card, (config.model.name,), min(contexts))
