"""The gateway's HTTP application: which route is answered by whom. Wires, decides nothing.

`python -m router.app --config cluster.toml` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from configs.schema import ClusterConfig
from events.errors import CoreError, UserError
from router.choice.shadow import Shadow
from router.openai import faults
from router.openapi.document import document
from router.ops.admin import Admin
from router.ops.hot import HotRoutes, register_hot
from router.ops.revision_admin import RevisionAdmin, register_revisions
from router.ops.tenant_admin import TenantAdmin
from router.services import Services
from router.serving.door import Door
from router.serving.generate import Generator
from router.serving.http import add_ids, error_middleware
from router.serving.lane import Lane
from router.split.signals import register_split
from router.telemetry.alarms import Alarms
from router.telemetry.gauges import register_accuracy, register_index, register_texts
from router.telemetry.metrics import Metrics, Sample
from router.tenancy.admit import add_limits
from router.tenancy.tenant_tally import merged, register_tallies
from router.waiting.stages import register_stages

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Model(msgspec.Struct):
    """As vLLM lists them: an adapter's `parent` is the model that it was made for, its `root` the
    name of its folder."""

    id: str
    created: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "warmroute"


def _served(config: ClusterConfig, created: int) -> list[_Model]:
    base = config.model.name
    adapters = (_Model(of.name, created, Path(of.path).name, base) for of in config.adapters)
    return [_Model(base, created, base), *adapters]


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


class _Status:
    """/, /v1/models, /health, /ready, /metrics."""

    def __init__(self, services: Services) -> None:
        self._of = services
        served = _served(services.config, services.created)
        self._models = {model.id: model for model in served}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    async def root(self, request: web.Request) -> web.Response:
        """To what a browser can show."""
        return web.Response(status=302, headers={"Location": "/dashboard"})

    async def models(self, request: web.Request) -> web.Response:
        """What can be asked for."""
        self._of.gate.authenticate(request.headers)
        return _json(_Models(list(self._models.values())))

    async def model(self, request: web.Request) -> web.Response:
        """One model, or OpenAI's 404."""
        self._of.gate.authenticate(request.headers)
        name = request.match_info["id"]
        if name not in self._models:
            raise faults.model_not_found(name)
        return _json(self._models[name])

    async def health(self, request: web.Request) -> web.Response:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """A request that comes now could be routed."""
        if not self._of.ready:
            draining = self._of.lifecycle.draining
            raise UserError(
                CoreError(
                    status=503,
                    message="shutting down" if draining else "no replica can be reached",
                    type="server_error",
                    code="draining" if draining else "no_replica",
                    retry_after_s=1.0,
                )
            )
        return _json({"status": "ready", "replicas": self._of.reachable})

    async def openapi(self, request: web.Request) -> web.Response:
        """Every route but the page's stream of events, for clients and fuzzers."""
        return _json(document(self._of.limits(self._of.jobs.pool())))

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus."""
        return web.Response(body=self._of.metrics.text(), headers={"Content-Type": METRICS_TYPE})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _register_gauges(services: Services) -> None:
    metrics: Metrics = services.metrics
    gate, links, fleet = services.gate, services.links, services.fleet
    backends = services.backends
    metrics.gauge("inflight_requests", "Requests inside", lambda: gate.requests)
    metrics.gauge("inflight_tokens", "Tokens that they count for", lambda: gate.tokens)
    admitter = services.admitter
    metrics.counters(
        "client_retries",
        "Requests that clients say they repeat",
        (),
        lambda: [((), admitter.client_retries)],
    )
    metrics.counters(
        "retry_causes",
        "Retries of the gateway's own, by what made them",
        ("cause",),
        lambda: [((why,), count) for why, count in services.budget.retried.items()],
    )
    metrics.counters(
        "degraded",
        "Requests of which something was made less",
        ("what",),
        lambda: [((what,), count) for what, count in admitter.degraded.items()],
    )
    metrics.gauge("inflight_attempts", "Attempts on all links", lambda: links.in_flight)
    metrics.gauge("links_up", "Links that requests can be sent on", lambda: len(links.up()))
    metrics.gauge("backends_up", "Backends of other kinds that answer", lambda: backends.up)
    metrics.gauge("replicas", "Replicas that the fleet knows", lambda: len(fleet))
    register_index(metrics, fleet, services.brain.optimistic, services.brain.ledger)
    register_accuracy(metrics, services.brain.accuracy)
    register_texts(metrics, [of.renderer for of in services.revisions.all()])
    metrics.gauge("links_resumed", "Broken connections that went on", lambda: links.resumed)
    metrics.gauge("late_deltas", "Deltas that nobody waited for", lambda: links.late_deltas)
    peers, registry = services.brain.peers, services.registry
    metrics.gauge("registry_online", "Whether changes are shared", lambda: registry.online)
    metrics.gauge("registry_settings", "Settings that routers share", lambda: len(registry))
    metrics.gauge("peers", "Other routers that are heard", lambda: len(peers))
    metrics.gauge("peer_dispatches", "Theirs that no load report shows", lambda: peers.open)
    tallies, shares = admitter.limits.tallies, services.shares
    metrics.gauges(
        "tenant_warm_blocks",
        "Blocks of the tenant that this router had computed last",
        ("tenant",),
        lambda: merged(shares.totals(), tallies),
    )
    metrics.gauge("tenants", "Tenants with a key", lambda: len(services.tenants))
    _register_alarms(metrics, fleet.alarms)
    _register_shadow(metrics, services.brain.shadow)
    register_hot(metrics, services)
    register_split(metrics, services.splitter, services.signals)
    register_revisions(metrics, services)


def _register_alarms(metrics: Metrics, alarms: Alarms) -> None:
    def by_name(counts: Mapping[str, int]) -> list[Sample]:
        return [((name,), count) for name, count in counts.items()]

    metrics.gauges("alarms", "Active alarms", ("name",), lambda: by_name(alarms.active_by_name()))
    metrics.counters(
        "alarms_raised", "Alarms turned on", ("name",), lambda: by_name(alarms.turned_on_total)
    )


def _register_shadow(metrics: Metrics, shadow: Shadow) -> None:
    metrics.counters(
        "shadow_decisions",
        "Decisions that a policy in the shadow scored too",
        ("shadow", "result"),
        shadow.counts,
    )
    metrics.counters(
        "shadow_predicted_cached_tokens",
        "Cached tokens as predicted for the decisions compared, by side",
        ("side",),
        lambda: shadow.predicted(lambda sums: sums.cached_tokens),
    )
    metrics.counters(
        "shadow_predicted_ttft_seconds",
        "Time to first token as predicted for the decisions compared, by side",
        ("side",),
        lambda: shadow.predicted(lambda sums: sums.ttft_ms / 1000),
    )


def build_app(
    services: Services, door: Door, more_routes: Sequence[web.RouteDef] = ()
) -> web.Application:
    """The application; it starts and stops nothing."""
    _register_gauges(services)
    register_stages(services.metrics, services, door)
    register_tallies(services.metrics, services.admitter.limits.tallies)
    generator = Generator(services)
    app = web.Application(
        middlewares=[door.middleware, error_middleware(services.metrics)],
        client_max_size=services.config.router.max_body_bytes,
    )
    generating = (
        ("/v1/chat/completions", generator.chat),
        ("/v1/completions", generator.completions),
    )
    for path, handler in generating:
        door.add_express(path, Lane(path, handler, services.metrics))
    app.on_response_prepare.append(add_ids)
    app.on_response_prepare.append(add_limits)
    app.add_routes(
        [
            *(web.post(path, handler) for path, handler in generating),
            *_Status(services).routes(),
            *Admin(services).routes(),
            *TenantAdmin(services).routes(),
            *HotRoutes(services).routes(),
            *RevisionAdmin(services).routes(),
            *more_routes,
        ]
    )
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until it is told to stop; the exit status."""
    from router.process import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
