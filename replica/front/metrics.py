"""The replica's own numbers in Prometheus' format: an own registry, fixed names, bounded labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from events.output import CoreFinish
from replica.engine.messages import EngineLoad

PREFIX = "warmroute_replica_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class FrontGauges(NamedTuple):
    """What the front holds now; each is zero when nothing is asked of it."""

    links: int
    attempts: int
    children: int
    held_attempts: int
    grammars_compiling: int
    output_waiting_bytes: int
    output_oldest_seconds: float


class FrontCounters:
    """What happened at the front since start. Plain integers where nothing else is needed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.late_outputs = 0
        self.deltas = 0
        self.deltas_merged = 0
        self.socket_blocked_s = 0.0
        self.mailbox_holds = 0
        self.mailbox_aborts = 0
        self.malformed_frames = 0
        self._finished = Counter(
            PREFIX + "children_finished",
            "Children by their end",
            ["reason"],
            registry=registry,
        )
        self._refused = Counter(
            PREFIX + "requests_refused", "Requests refused at intake", ["code"], registry=registry
        )
        self._links_refused = Counter(
            PREFIX + "links_refused", "Links closed at the handshake", ["reason"], registry=registry
        )
        self._ttft = Histogram(
            PREFIX + "ttft_seconds", "Receipt to first token", registry=registry, buckets=_SECONDS
        )

    def finish(self, reason: str) -> None:
        """One child ended; `reason` is one of events.output.FINISH_*."""
        self._finished.labels(reason).inc()

    def finished(self, finish: CoreFinish, ttft_s: float | None) -> None:
        """One child ended and its router is told."""
        self.finish(finish.reason)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    def refuse(self, code: str) -> None:
        """`code` is one of ours, never a caller's text."""
        self._refused.labels(code).inc()

    def refuse_link(self, reason: str) -> None:
        """`reason` is one of ours, never a caller's text."""
        self._links_refused.labels(reason).inc()


class _Snapshot(Collector):
    """Reads engine and front when scraped."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        gauges: Callable[[], FrontGauges],
        counters: FrontCounters,
    ) -> None:
        self._load = load
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges()._asdict().items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", f"{name} at the front now", value)
        load, counters = self._load(), self._counters
        for name in (
            "waiting",
            "running",
            "queued_prefill_tokens",
            "running_context_tokens",
            "held_requests",
            "held_blocks",
            "free_blocks",
            "cached_blocks",
            "total_blocks",
            "step_ms",
        ):
            yield GaugeMetricFamily(f"{PREFIX}engine_{name}", f"{name} now", getattr(load, name))
        for name, total in (
            ("engine_steps", load.steps),
            ("prompt_tokens", load.prompt_tokens_total),
            ("cached_tokens", load.cached_tokens_total),
            ("preemptions", load.preemptions_total),
            ("failed_plans", load.failed_plans),
            ("broken_invariants", load.broken_invariants),
            ("late_outputs", counters.late_outputs),
            ("deltas", counters.deltas),
            ("deltas_merged", counters.deltas_merged),
            ("socket_blocked_seconds", counters.socket_blocked_s),
            ("mailbox_holds", counters.mailbox_holds),
            ("mailbox_aborts", counters.mailbox_aborts),
            ("malformed_frames", counters.malformed_frames),
        ):
            yield CounterMetricFamily(PREFIX + name, f"{name} since start", total)
        adapters = load.adapters
        for name, value in (
            ("resident", len(adapters.resident)),
            ("in_use", adapters.in_use),
            ("loading", adapters.loading),
        ):
            yield GaugeMetricFamily(f"{PREFIX}adapters_{name}", f"LoRA adapters {name} now", value)
        for name, total in (
            ("loads", adapters.loads),
            ("load_failures", adapters.failures),
            ("evictions", adapters.evictions),
        ):
            text = f"{name} of LoRA adapters since start"
            yield CounterMetricFamily(f"{PREFIX}adapter_{name}", text, total)
        if load.shadow is not None:
            for name in ("started", "differed", "overtaken", "refused"):
                text = f"requests {name} by the order of service in the shadow"
                yield CounterMetricFamily(
                    f"{PREFIX}shadow_{name}", text, getattr(load.shadow, name)
                )
        yield GaugeMetricFamily(
            PREFIX + "recomputed_tokens",
            "Tokens computed again after a preemption, since start",
            load.recomputed_tokens_total,
        )
        for name, reasons in (
            ("admission_later", load.later),
            ("admission_never", load.never),
            ("displaced", load.displaced),
            ("held_kv", load.held),
        ):
            family = CounterMetricFamily(PREFIX + name, f"{name} by reason", labels=["reason"])
            for reason, count in reasons.items():
                family.add_metric([reason], count)
            yield family


class Metrics:
    """Registry and counters; `watch` adds what is read at scrape time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = FrontCounters(self.registry)

    def watch(self, load: Callable[[], EngineLoad], gauges: Callable[[], FrontGauges]) -> None:
        """Show engine and front."""
        self.registry.register(_Snapshot(load, gauges, self.counters))

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)
