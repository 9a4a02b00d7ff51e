"""What /metrics reads of locality and its truth, when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from events.feed import FeedStats
from events.nats import BusStats
from router.choice.reserve import Ledger
from router.fleet.fleet import Fleet
from router.locality.optimistic import OptimisticEntries
from router.rendering.render import Renderer
from router.telemetry.accuracy import Accuracy, Sums
from router.telemetry.metrics import Metrics, Sample


def register_index(
    metrics: Metrics, fleet: Fleet, optimistic: OptimisticEntries, ledger: Ledger
) -> None:
    """What locality is known from: memory and its bounds, false hits, what found no room."""
    metrics.gauge("index_bytes", "Memory of the digest index", lambda: fleet.index.nbytes)
    metrics.gauge("index_limit_bytes", "At most", lambda: fleet.index.max_bytes)
    below = fleet.below
    metrics.gauge("lower_index_bytes", "The same of tiers below devices", lambda: below.nbytes)
    metrics.gauge("lower_index_limit_bytes", "At most", lambda: below.max_bytes)
    metrics.gauge("promised_bytes", "Keys of what is on its way", lambda: optimistic.nbytes)
    metrics.gauge("promised_limit_bytes", "At most", lambda: optimistic.max_bytes)

    def false_hits() -> list[Sample]:
        return [((name,), rate) for name, rate in fleet.false_hits.rates()]

    metrics.gauges(
        "digest_false_positive_rate",
        "Of a replica's digest, per absent key asked, as measured here",
        ("replica",),
        false_hits,
    )

    def unplaced() -> int:
        return fleet.index.unplaced_total + below.unplaced_total

    for name, text, total in (
        ("digests_unplaced", "Digests without room", unplaced),
        ("promises_dropped", "Promises without room", lambda: optimistic.dropped_total),
        ("reservations_expired", "Written off before their end", lambda: ledger.expired_total),
    ):
        metrics.counters(name, text, (), partial(_alone, total))


def register_texts(metrics: Metrics, renderers: Sequence[Renderer]) -> None:
    """Memory of the texts whose token ids are known, of all revisions."""

    def held() -> int:
        return sum(of.text_bytes for of in renderers)

    def limit() -> int:
        return sum(of.text_limit_bytes for of in renderers)

    metrics.gauge("text_cache_bytes", "Texts whose token ids are known", held)
    metrics.gauge("text_cache_limit_bytes", "At most", limit)


def register_feed(metrics: Metrics, stats: FeedStats) -> None:
    """What the replicas' messages were found to be."""
    text = "Of what replicas say on the bus"
    metrics.counters("feed_events", text, ("event",), partial(_fields, stats))


def register_bus(metrics: Metrics, stats: BusStats) -> None:
    """What became of messages to and from the bus."""
    text = "Of this router's messages and its connection"
    metrics.counters("bus_events", text, ("event",), partial(_fields, stats))


def _alone(total: Callable[[], int]) -> list[Sample]:
    return [((), total())]


def _fields(stats: FeedStats | BusStats) -> list[Sample]:
    return [((name,), count) for name, count in asdict(stats).items()]


def register_accuracy(metrics: Metrics, accuracy: Accuracy) -> None:
    """Predicted against actual, by replica and tenant."""
    counted: dict[str, tuple[str, Callable[[Sums], float]]] = {
        "trust_answered": ("Answered requests", lambda of: of.answered),
        "trust_matched_tokens": ("Prompt tokens in the digest", lambda of: of.matched_tokens),
        "trust_usable_tokens": ("Cached tokens reckoned with", lambda of: of.usable_tokens),
        "trust_skipped_tokens": ("Cached tokens found", lambda of: of.skipped_tokens),
        "trust_predicted_ttft_seconds": ("As predicted", lambda of: of.predicted_ttft_ms / 1e3),
        "trust_ttft_seconds": ("As it came", lambda of: of.ttft_ms / 1e3),
        "trust_wrong_depth": ("Digest over 2 blocks too deep", lambda of: of.wrong_depth),
    }
    for name, (text, value) in counted.items():
        metrics.counters(name, text, ("replica", "tenant"), partial(accuracy.read, value))
    metrics.gauge(
        "wrong_depth_ratio",
        "Share of answered requests whose digest was over 2 blocks too deep",
        lambda: accuracy.total.wrong_depth_ratio,
    )
