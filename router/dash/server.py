"""Serving the page and its stream of views. Costs nothing while nobody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from importlib import resources

import msgspec
from aiohttp import web

from events.bus import Bus, Subscription
from events.errors import UserError
from events.subjects import replica_subject, router_subject
from router.dash.state import DashboardState

PERIOD_S = 0.5
MAX_VIEWERS = 16
ASK_HEADERS = {"WWW-Authenticate": 'Basic realm="warmroute: the admin key"'}
"""Makes a browser ask its user."""

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The two routes of the page, fed from the bus."""

    def __init__(self, bus: Bus, cluster: str, check: Callable[[Mapping[str, str]], None]) -> None:
        """`check` raises UserError for headers that may not look."""
        self._bus = bus
        self._check = check
        self._cluster = cluster
        self._state = DashboardState()
        self._subscriptions: list[Subscription] = []
        self._viewers = 0
        self._page = resources.files("router.dash").joinpath("page.html").read_text()

    def routes(self) -> list[web.RouteDef]:
        """To be added to the gateway's application."""
        return [web.get("/dashboard", self._show), web.get("/dashboard/events", self._stream)]

    async def start(self) -> None:
        """Subscribe; the state fills while nobody watches, so that a viewer sees the past."""
        for subject in (
            replica_subject(self._cluster, "*", "*"),
            router_subject(self._cluster, "*", "*"),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, self._take))

    async def close(self) -> None:
        """Idempotent."""
        while self._subscriptions:
            await self._subscriptions.pop().close()

    def _take(self, subject: str, payload: bytes) -> None:
        self._state.take(subject, payload, time.monotonic())

    async def _show(self, request: web.Request) -> web.Response:
        try:
            self._check(request.headers)
        except UserError as refused:
            return web.Response(status=401, headers=ASK_HEADERS, text=refused.error.message)
        return web.Response(text=self._page, content_type="text/html", headers=PAGE_HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._check(request.headers)
        if self._viewers >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "5"}, text="too many viewers")
        self._viewers += 1
        try:
            return await self._send_views(request)
        finally:
            self._viewers -= 1

    async def _send_views(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while True:
            view = msgspec.json.encode(self._state.view(time.monotonic()))
            try:
                await response.write(b"data: " + view + b"\n\n")
            except ConnectionError:
                return response
            await asyncio.sleep(PERIOD_S)
