"""Everything the routes need, made once per process and handed to them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from configs.model.card import ModelCard
from configs.schema import ClusterConfig
from router.choose import RouterBrain
from router.dispatch import Dispatcher
from router.failover import RetryBudget
from router.fleet import Fleet
from router.gate import Gate
from router.jobs import JobMaker
from router.links import Links
from router.metrics import Metrics
from router.openai.logprobs import TokenTexts
from router.prefixes import PublicPrefixes
from router.render import Renderer
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
    tenants: Tenants
    gate: Gate
    prefixes: PublicPrefixes
    renderer: Renderer
    texts: TokenTexts
    jobs: JobMaker
    dispatcher: Dispatcher
    budget: RetryBudget
    metrics: Metrics
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> bool:
        """Whether a request that comes now could be routed."""
        return (
            not self.lifecycle.draining and self.jobs.pool() is not None and bool(self.links.up())
        )
