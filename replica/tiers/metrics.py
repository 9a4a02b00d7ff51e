"""The tiers' numbers for a scrape: per tier, per end of a load, per reason; nothing of any request.

Reasons and tier names are words of our own, so labels are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.level import Level
from replica.tiers.tiers import ReplicaTiers

PREFIX = "warmroute_replica_kv_"


class TierMetrics(Collector):
    """Reads the tiers when scraped."""

    def __init__(self, tiers: ReplicaTiers) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        tiers = self._tiers
        levels = tiers.cascade.levels
        yield from _by_tier({level.name: _totals(level) for level in levels})
        yield from _gauges({level.name: _now(level) for level in levels})
        for name in ("refused", "failed"):
            rows = {level.name: getattr(level.counts, name) for level in levels}
            yield _reasons(f"{name}_blocks", f"blocks {name}, by reason", rows)
        yield from self._loads()
        yield from self._writes()

    def _loads(self) -> Iterator[Metric]:
        loader, spot = self._tiers.loader, self._tiers.spot
        ends = CounterMetricFamily(PREFIX + "loads", "loads by their end", labels=["end"])
        for how, count in dict(loader.ends).items():
            ends.add_metric([how], count)
        yield ends
        for name, total in (
            ("loaded_blocks", loader.loaded_blocks),
            ("discarded_blocks", loader.discarded_blocks),
            ("compared_blocks", spot.checked),
            ("recompute_mismatches", spot.mismatches),
        ):
            yield CounterMetricFamily(PREFIX + name, f"{name} since start", total)

    def _writes(self) -> Iterator[Metric]:
        outbound = self._tiers.outbound
        backlog = GaugeMetricFamily(
            PREFIX + "write_backlog_blocks", "blocks that wait to be written", labels=["to"]
        )
        dropped = CounterMetricFamily(
            PREFIX + "write_dropped_blocks", "blocks that found no room to wait", labels=["to"]
        )
        for place, to in enumerate(("host", "remote")):
            backlog.add_metric([to], outbound.backlog_blocks[place])
            dropped.add_metric([to], outbound.dropped_blocks[place])
        yield backlog
        yield dropped
        skipped = CounterMetricFamily(
            PREFIX + "write_skipped_blocks", "blocks that were not written", labels=["reason"]
        )
        for reason, count in dict(outbound.skipped).items():
            skipped.add_metric([reason], count)
        yield skipped


def _totals(level: Level) -> dict[str, float]:
    counts = level.counts
    return {
        "questions": counts.asked,
        "hit_blocks": counts.hits,
        "wasted_blocks": counts.wasted,
        "read_bytes": counts.read_bytes,
        "read_seconds": counts.read_s,
        "stored_blocks": counts.stored,
        "stored_bytes": counts.stored_bytes,
        "present_blocks": counts.present,
    }


def _now(level: Level) -> dict[str, float]:
    stats, speed = level.tier.stats(), level.speed
    return {
        "usable": level.usable,
        "latency_ms": speed.latency_ms,
        "bytes_per_ms": 1.0 / speed.ms_per_byte,
        "resident_blocks": stats.blocks,
        "used_bytes": stats.used_bytes,
        "backlog_bytes": stats.backlog_bytes,
    }


def _by_tier(rows: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for name in next(iter(rows.values()), {}):
        family = CounterMetricFamily(PREFIX + name, f"{name} since start", labels=["tier"])
        for tier, values in rows.items():
            family.add_metric([tier], values[name])
        yield family


def _gauges(rows: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for name in next(iter(rows.values()), {}):
        family = GaugeMetricFamily(PREFIX + name, f"{name} now", labels=["tier"])
        for tier, values in rows.items():
            family.add_metric([tier], values[name])
        yield family


def _reasons(name: str, about: str, rows: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, about, labels=["tier", "reason"])
    for tier, counts in rows.items():
        for reason, count in dict(counts).items():
            family.add_metric([tier, reason], count)
    return family
