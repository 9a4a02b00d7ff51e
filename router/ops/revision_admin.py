"""/router/revisions: how the revisions of the model do, and who gets which share."""

from __future__ import annotations

import asyncio

from aiohttp import web

from events.errors import CoreError, UserError
from router.cluster.shared import REVISION
from router.fleet.expected import MAIN
from router.openai import faults
from router.openai.fields import Field, Table, decimal, string
from router.ops.admin import json_response, read_change
from router.revisions.revisions import Share, encode_share
from router.services import Services
from router.telemetry.metrics import Metrics

_SHARE: Table = {
    "revision": Field("revision", string(64, 1), required=True),
    "weight": Field("weight", decimal(0.0, 1.0)),
    "mirror": Field("mirror", decimal(0.0, 1.0)),
}


class RevisionAdmin:
    """Handlers of both methods. A revert is shared as if an operator had asked for it."""

    def __init__(self, services: Services) -> None:
        self._of = services
        self._sharing: set[asyncio.Task[bool]] = set()
        services.revisions.on_reverted = self._reverted

    def routes(self) -> list[web.RouteDef]:
        """To be added to the application."""
        return [
            web.get("/router/revisions", self.revisions),
            web.put("/router/revisions", self.set_share),
        ]

    async def revisions(self, request: web.Request) -> web.Response:
        """Shares, replicas, and how the latest attempts went, live and mirrored."""
        self._of.gate.check_reader(request.headers)
        return json_response({"revisions": self._of.revisions.report()})

    async def set_share(self, request: web.Request) -> web.Response:
        """{"revision", "weight", "mirror"}: what is not given stays; ends a revert."""
        asked = await read_change(self._of.gate, request, _SHARE)
        name, revisions = asked["revision"], self._of.revisions
        if not revisions.others:
            raise faults.invalid_value("revision", "the cluster file names no other revision")
        if name not in revisions.others:
            raise faults.not_one_of("revision", tuple(revisions.others))
        known = revisions.others[name].share
        share = Share(asked.get("weight", known.weight), asked.get("mirror", known.mirror))
        if share.weight - known.weight > revisions.weights()[MAIN]:
            raise _too_much()
        revisions.set_share(name, share)
        shared = await self._of.registry.share(REVISION, name, encode_share(share))
        return json_response({"revision": name, "shared": shared, "weights": revisions.weights()})

    def _reverted(self, name: str) -> None:
        share = self._of.revisions.others[name].share
        task = asyncio.create_task(self._of.registry.share(REVISION, name, encode_share(share)))
        self._sharing.add(task)
        task.add_done_callback(self._sharing.discard)


def _too_much() -> UserError:
    message = "the weights of all revisions would come to more than 1"
    return UserError(CoreError(status=400, message=message, param="weight", code="invalid_value"))


def register_revisions(metrics: Metrics, services: Services) -> None:
    """Their names come from the cluster file."""
    revisions, mirror = services.revisions, services.mirror
    metrics.gauges(
        "revision_weight",
        "Share of the requests",
        ("revision",),
        lambda: [((name,), weight) for name, weight in revisions.weights().items()],
    )
    metrics.counters(
        "mirrored",
        "Copies of requests, by revision and how they ended",
        ("revision", "status"),
        lambda: list(mirror.totals.items()),
    )
