"""The replica's HTTP side: the routers' link, liveness, readiness, metrics. Nothing else."""

from __future__ import annotations

from aiohttp import web

from replica.front.health import Progress
from replica.front.link import LinkServer
from replica.front.metrics import FrontGauges, Metrics
from replica.front.session import Front


class FrontApp:
    """Builds the application. Bodies are refused: no route takes one."""

    def __init__(
        self, front: Front, links: LinkServer, metrics: Metrics, progress: Progress
    ) -> None:
        self._front = front
        self._links = links
        self._metrics = metrics
        self._progress = progress
        metrics.watch(front.engine.load, self._gauges)

    def build(self) -> web.Application:
        """The aiohttp application; closing it closes the links."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/link", self._links.handle)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._exposition)
        app.on_shutdown.append(self._close_links)
        return app

    @property
    def healthy(self) -> bool:
        """Alive, and stepping where there is work."""
        return self._progress.healthy(self._front.engine.load(), self._front.attempts.schedulable)

    def _gauges(self) -> FrontGauges:
        attempts = self._front.attempts
        return FrontGauges(
            links=len(self._links),
            attempts=len(attempts),
            children=attempts.live_children,
            waiting_tokens=attempts.waiting_tokens,
        )

    async def _close_links(self, app: web.Application) -> None:
        await self._links.close()

    async def _health(self, request: web.Request) -> web.Response:
        return _verdict(self.healthy, "stalled")

    async def _ready(self, request: web.Request) -> web.Response:
        if self._front.intake.draining:
            return _verdict(False, "draining")
        return _verdict(self.healthy, "stalled")

    async def _exposition(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _verdict(good: bool, otherwise: str) -> web.Response:
    return web.json_response({"status": "ok" if good else otherwise}, status=200 if good else 503)
