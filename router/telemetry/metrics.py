"""Prometheus metrics of the gateway. Every label comes from a fixed set, never from a client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from events.decision import RouteDecision
from router.choice.route import Outcome
from router.telemetry.histogram import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


Sample = tuple[Sequence[str], float]
"""Values of the labels, in order, and the value."""

Counts = Counter[tuple[str, ...]]
"""Totals by the values of the labels."""


class _Family(Collector):
    """Samples that are read when somebody scrapes."""

    def __init__(
        self,
        family: Callable[[], CounterMetricFamily | GaugeMetricFamily],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        self._family = family
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        family = self._family()
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family


class Metrics:
    """One registry per application; also a RouteListener. `gaps`: seconds between two deltas
    of a stream."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._requests = self._counter(
            "requests", "HTTP requests by route and status", "route", "status"
        )
        self._attempts = self._counter("attempts", "Attempts by how they ended", "status")
        self._faults = self._counter("stream_errors", "Streams ended by an error", "cause")
        self._decisions = self._counter("decisions", "Choices made")
        self._retries = self._counter("retries", "Choices beyond the first of a request")
        self._continuations = self._counter(
            "continuations", "Streams that another replica went on with"
        )
        self._carried = self._counter("continued_tokens", "Tokens delivered before a continuation")
        self._predicted = self._counter("predicted_cached_tokens", "Cached tokens as predicted")
        self._cached = self._counter("cached_tokens", "Prompt tokens served from caches")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests")
        self._completion = self._counter("completion_tokens", "Generated tokens")
        self._ttft = self._histogram(
            "ttft_seconds",
            "From dispatch, or the start of its hand-off, to the first token",
            _SECONDS,
        )
        self._duration = self._histogram("attempt_seconds", "Dispatch to end", _SECONDS)
        self.gaps = self._histogram("itl_seconds", "Between deltas of a stream", _GAPS)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A value that is read when somebody scrapes."""
        gauge = Gauge(f"warmroute_{name}", help_text, registry=self.registry)
        gauge.set_function(read)

    def counters(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        """Totals kept elsewhere; the labels' values must come from a fixed set."""
        full = f"warmroute_{name}"
        family = partial(CounterMetricFamily, full, help_text, labels=labels)
        self.registry.register(_Family(family, read))

    def gauges(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        """Values kept elsewhere; the labels' values must come from a fixed set."""
        full = f"warmroute_{name}"
        family = partial(GaugeMetricFamily, full, help_text, labels=labels)
        self.registry.register(_Family(family, read))

    def answered(self, route: str, status: int) -> None:
        """An HTTP request got its status."""
        self._requests[route, str(status)] += 1

    def stream_error(self, cause: str) -> None:
        """A stream that had begun ended with an error; `cause` is a kind of AttemptError."""
        self._faults[cause,] += 1

    def stream_errors(self, cause: str) -> int:
        """How many streams ended so."""
        return self._faults[cause,]

    def decided(self, decision: RouteDecision) -> None:
        """A choice was made."""
        self._decisions[()] += 1
        if decision.attempt > 1:
            self._retries[()] += 1

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        """A choice was made for what is left of a broken stream."""
        self._continuations[()] += 1
        self._carried[()] += carried_tokens

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """An attempt ended."""
        self._attempts[outcome.status,] += 1
        self._completion[()] += outcome.completion_tokens
        self._duration.observe(outcome.e2e_ms / 1000)
        if outcome.ttft_ms is not None:
            self._ttft.observe((decision.hand_off_ms + outcome.ttft_ms) / 1000)
        if outcome.prompt_tokens:
            self._predicted[()] += decision.predicted_cached_tokens
            self._cached[()] += outcome.cached_tokens
            self._prompt[()] += outcome.prompt_tokens

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counts:
        counts: Counts = Counter() if labels else Counter({(): 0})
        self.counters(name, help_text, labels, lambda: list(counts.items()))
        return counts

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"warmroute_{name}", help_text, bounds)
        self.registry.register(histogram)
        return histogram
