"""/router/hot and /router/scale: lengths, rates and places, never texts, ids or keys."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from router.replication.copies import Order
from router.replication.heat import HotHead
from router.services import Services
from router.telemetry.metrics import Metrics


class HotRoutes:
    """Both routes only look."""

    def __init__(self, services: Services) -> None:
        self._of = services

    def routes(self) -> list[web.RouteDef]:
        """To be added to the application."""
        return [web.get("/router/hot", self.hot), web.get("/router/scale", self.scale)]

    async def hot(self, request: web.Request) -> web.Response:
        """The hottest heads, who holds them, and what was done about them, newest last."""
        self._of.gate.check_reader(request.headers)
        replicator, settings = self._of.replicator, self._of.config.router
        copies, budget = replicator.copies, replicator.budget
        return _json(
            {
                "replicate": settings.replicate,
                "share": settings.replicate_share,
                "credit_ms": budget.credit_ms,
                "spent_ms_total": budget.spent_ms_total,
                "heads": [self._head(head) for head in replicator.heat.heads],
                "running": [_order(order) for order in copies.running],
                "copies": list(copies.records),
            }
        )

    async def scale(self, request: web.Request) -> web.Response:
        """Whether the fleet is large enough, as on the bus."""
        self._of.gate.check_reader(request.headers)
        signal = msgspec.to_builtins(self._of.scale_signal())
        totals = {name: count for (name,), count in self._of.pressure.totals()}
        return _json({**signal, "forced_off_total": totals})

    def _head(self, head: HotHead) -> dict[str, Any]:
        return {
            "head": head.number,
            "tenant": head.tenant,
            "pool": head.pool,
            "tokens": head.tokens,
            "requests_per_s": head.requests_per_s,
            "forced_off_per_s": head.forced_off_per_s,
            "share": head.share,
            "holders": self._of.replicator.standing(head).holders,
        }


def _order(order: Order) -> dict[str, Any]:
    return {
        "head": order.head.number,
        "replica": order.replica,
        "why": order.why,
        "cost_ms": order.cost_ms,
    }


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def register_hot(metrics: Metrics, services: Services) -> None:
    """Gauges and counters of both."""
    pressure, replicator = services.pressure, services.replicator
    heat, copies = replicator.heat, replicator.copies
    metrics.counters(
        "forced_off_warm",
        "Choices that left the replica that was warm for them, because of what waited there",
        ("replica",),
        pressure.totals,
    )
    metrics.gauge(
        "forced_off_warm_per_s", "The same, lately", lambda: pressure.signal().forced_off_per_s
    )
    metrics.gauge("hot_heads", "Heads of prompts that are hot", lambda: len(heat.heads))
    metrics.gauge("hot_head_bytes", "Memory of their token ids", lambda: heat.head_bytes)
    metrics.counters(
        "head_copies",
        "Hot heads brought to one more replica, by cause and end",
        ("why", "status"),
        lambda: list(copies.totals.items()),
    )
    metrics.counters(
        "head_copy_tokens",
        "Prompt tokens computed for that",
        (),
        lambda: [((), copies.computed_tokens_total)],
    )
