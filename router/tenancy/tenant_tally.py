"""What each tenant asked for and got, for the metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from events.decision import RouteDecision
from router.choice.route import Outcome
from router.telemetry.histogram import Histogram
from router.telemetry.metrics import Metrics, Sample
from router.telemetry.tally import OTHERS, TopNames

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Tally:
    """Totals of one tenant. `refused`: by the limit that did it."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.refused: Counter[str] = Counter()
        self.wait = Histogram("", "", SECONDS)
        self.ttft = Histogram("", "", SECONDS)

    def add(self, other: Tally) -> None:
        """Take over what another one has counted."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.refused.update(other.refused)
        self.wait.add(other.wait)
        self.ttft.add(other.ttft)


class Tallies:
    """By label: the busiest tenants' names, and one for all others."""

    def __init__(self) -> None:
        self.by_label = defaultdict(Tally, {OTHERS: Tally()})
        self._names = TopNames(self.forget)

    def asked(self, tenant: str) -> None:
        """The tenant has one more request."""
        label = self._names.label(tenant)
        self.by_label[label].requests += 1

    def of(self, tenant: str) -> Tally:
        """Where the tenant is counted now."""
        return self.by_label.get(tenant) or self.by_label[OTHERS]

    def forget(self, tenant: str) -> None:
        """The tenant has no label any more: what it had counts with the others."""
        if tenant != OTHERS and tenant in self.by_label:
            self.by_label[OTHERS].add(self.by_label.pop(tenant))

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """An attempt ended."""
        tally = self.of(decision.tenant)
        tally.completion_tokens += outcome.completion_tokens
        if outcome.ttft_ms is not None:
            tally.prompt_tokens += outcome.prompt_tokens
            tally.cached_tokens += outcome.cached_tokens
            tally.ttft.observe(outcome.ttft_ms / 1000)


class _Histograms(Collector):
    """One histogram for each label."""

    def __init__(
        self, name: str, help_text: str, tallies: Tallies, of: Callable[[Tally], Histogram]
    ) -> None:
        self._about = (f"warmroute_{name}", help_text)
        self._tallies = tallies
        self._of = of

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(*self._about, labels=("tenant",))
        for label, tally in self._tallies.by_label.items():
            histogram = self._of(tally)
            family.add_metric((label,), histogram.buckets(), histogram.total)
        yield family


def merged(totals: Counter[str], tallies: Tallies) -> list[Sample]:
    """Totals by tenant as samples by label."""
    by_label: Counter[str] = Counter()
    for tenant, value in totals.items():
        by_label[tenant if tenant in tallies.by_label else OTHERS] += value
    return [((label,), value) for label, value in by_label.items()]


def register_tallies(metrics: Metrics, tallies: Tallies) -> None:
    """Read at each scrape."""

    def total(name: str) -> Iterable[Sample]:
        return [((label,), getattr(tally, name)) for label, tally in tallies.by_label.items()]

    def refused() -> Iterable[Sample]:
        for label, tally in tallies.by_label.items():
            yield from (((label, why), count) for why, count in tally.refused.items())

    for name, what in (
        ("requests", "Requests"),
        ("prompt_tokens", "Prompt tokens of answered requests"),
        ("cached_tokens", "Prompt tokens served from caches"),
        ("completion_tokens", "Generated tokens"),
    ):
        metrics.counters(
            f"tenant_{name}", f"{what}, by tenant", ("tenant",), lambda name=name: total(name)
        )
    metrics.counters(
        "tenant_refused", "Refusals by tenant and limit", ("tenant", "reason"), refused
    )
    for name, help_text, of in (
        ("tenant_wait_seconds", "Waited for its turn", lambda tally: tally.wait),
        ("tenant_ttft_seconds", "Dispatch to first token", lambda tally: tally.ttft),
    ):
        metrics.registry.register(_Histograms(name, help_text, tallies, of))
