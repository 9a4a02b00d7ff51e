"""The arena's books as Prometheus metrics. Owners are digests of salts: no name, no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstore.arena.messages import ArenaStats

MAX_SCOPES = 50
"""Owners by name, the largest first; the others are one."""
_NOW = {
    "total_bytes": "Memory of the arena",
    "used_bytes": "Memory of slots that are in use",
    "blocks": "Blocks that can be read",
    "writing": "Slots that are being written",
    "leased": "Blocks that are being read",
    "dying": "Blocks that are forgotten and still being read",
    "quarantined_bytes": "Memory that late writers may still write to",
    "pinned_bytes": "Memory of blocks that are kept for a time",
    "sessions": "Users that are connected",
}
_COUNTS = {
    "hits": "Blocks opened",
    "misses": "Blocks asked for that were not there, or behind one that was not",
    "stored": "Blocks written",
    "evicted": "Blocks that had to leave",
    "expired": "Blocks whose time was over",
    "deleted": "Blocks forgotten on request",
    "bad_commits": "Commits that were refused",
    "overdue": "Users that kept slots for too long",
    "reaped": "Slots taken back from users that ended",
}


class ArenaCollector(Collector):
    """Reads the books when it is asked."""

    def __init__(self, stats: Callable[[], ArenaStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """All of it, of one moment."""
        stats = self._stats()
        for name, text in _NOW.items():
            yield GaugeMetricFamily(f"warmroute_kvd_{name}", text, getattr(stats, name))
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"warmroute_kvd_{name}", text, getattr(stats, name))
        refused = CounterMetricFamily(
            "warmroute_kvd_refused", "Blocks that got no slot", labels=["reason"]
        )
        for reason, count in stats.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield _scopes(stats)


def _scopes(stats: ArenaStats) -> GaugeMetricFamily:
    used = GaugeMetricFamily("warmroute_kvd_scope_bytes", "Memory by owner", labels=["scope"])
    for scope in stats.scopes[:MAX_SCOPES]:
        used.add_metric([scope.scope[:12]], scope.used_bytes)
    if rest := stats.scopes[MAX_SCOPES:]:
        used.add_metric(["others"], sum(scope.used_bytes for scope in rest))
    return used


def serve_metrics(stats: Callable[[], ArenaStats], port: int) -> Callable[[], None]:
    """On loopback, in a thread of its own; call what is returned to end it. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(ArenaCollector(stats))
    server, thread = start_http_server(port, "127.0.0.1", registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
