"""The replica's HTTP side: the routers' link, liveness, readiness, metrics. Nothing else."""

from __future__ import annotations

import logging

from aiohttp import web
from prometheus_client.registry import Collector

from replica.front.health import Progress
from replica.front.link import LinkServer
from replica.front.metrics import FrontGauges, Metrics
from replica.front.session import Front

SHUTDOWN_S = 2.0


class _KindOnly(logging.Filter):
    """The HTTP library logs a bad request with its bytes; only the error's kind is kept."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "error"
        record.msg, record.args, record.exc_info = f"bad request ({kind})", (), None
        return True


log = logging.getLogger(__name__)
log.addFilter(_KindOnly())


class FrontApp:
    """Builds the application and what runs it. No route takes a body."""

    def __init__(
        self, front: Front, links: LinkServer, metrics: Metrics, progress: Progress
    ) -> None:
        self.front = front
        self._links = links
        self._metrics = metrics
        self._progress = progress
        metrics.watch(front.engine.load, self._gauges)

    def expose(self, collector: Collector) -> None:
        """More numbers for /metrics."""
        self._metrics.registry.register(collector)

    def runner(self) -> web.AppRunner:
        """What serves the application; cleaning it up closes the links."""
        return web.AppRunner(
            self._build(), access_log=None, logger=log, shutdown_timeout=SHUTDOWN_S
        )

    def _build(self) -> web.Application:
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
        return self._progress.healthy(self.front.engine.load(), self.front.attempts.schedulable)

    def _gauges(self) -> FrontGauges:
        attempts, compiling = self.front.attempts, self.front.intake.compiling
        return FrontGauges(
            links=len(self._links),
            attempts=len(attempts),
            children=attempts.live_children,
            held_attempts=attempts.held,
            grammars_compiling=0 if compiling is None else len(compiling),
            output_waiting_bytes=attempts.waiting_bytes,
            output_oldest_seconds=attempts.oldest_age_s,
        )

    async def _close_links(self, app: web.Application) -> None:
        await self._links.close()
        if self.front.intake.compiling is not None:
            self.front.intake.compiling.close()

    async def _health(self, request: web.Request) -> web.Response:
        return _verdict(self.healthy, "stalled")

    async def _ready(self, request: web.Request) -> web.Response:
        if self.front.intake.draining:
            return _verdict(False, "draining")
        return _verdict(self.healthy, "stalled")

    async def _exposition(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _verdict(good: bool, otherwise: str) -> web.Response:
    return web.json_response({"status": "ok" if good else otherwise}, status=200 if good else 503)
