"""Where work waits or is held on its way through the gateway, as one table in the metrics.

Each stage has a bound in a unit of its own, told by its name here:

connections, requests  a count of each
body                   bytes of bodies that are being read
tokenise               characters that wait for a thread or are in one
tokens                 tokens of prompts and expected answers inside
queue, queue_tokens    requests that wait for their turn, and their tokens
link                   bytes on the way to one replica: of the fullest link
kv                     KV blocks in use: of the fullest replica
output                 bytes that wait for one client: of the slowest reader
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from events.errors import QUEUE_LONGER
from router.dispatch.link import MAX_OUTBOX_BYTES
from router.errors import LINK_FULL
from router.fleet.fleet import Fleet
from router.services import Services
from router.serving.door import Door
from router.telemetry.metrics import Metrics, Sample
from router.waiting.comebacks import ELSEWHERE
from router.waiting.held import Held


@dataclass(frozen=True, slots=True)
class Stage:
    """One row. `oldest_s` is 0 where nothing is held. `retried`: of what it refused, what came
    again, from a client or from the gateway itself."""

    name: str
    depth: float
    limit: float
    oldest_s: float
    refused: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0


def _of_held(name: str, held: Held, came: Mapping[str, int]) -> Stage:
    return Stage(name, held.depth, held.limit, held.oldest_s(), held.refused, came[name])


def stages(of: Services, door: Door) -> Iterator[Stage]:
    """All of them, as they are now, in the order of a request's way."""
    config, gate, queue = of.config.router, of.gate, of.admitter.queue
    came = of.admitter.comebacks.by_stage
    # Whoever was refused at the door was not asked who he is.
    strangers = min(door.refused, came[ELSEWHERE])
    refused = {"full": door.refused}
    yield Stage("connections", door.connections, door.limit, door.idlest_s(), refused, strangers)
    yield _of_held("requests", gate.held, came)
    yield _of_held("body", of.bodies.held, came)
    yield _of_held("tokenise", of.renderer.pending, came)
    limit, oldest_s = config.max_inflight_tokens, gate.held.oldest_s()
    yield Stage("tokens", gate.tokens, limit, oldest_s, gate.refused, came["tokens"])
    waiting = queue.held
    yield Stage("queue", len(waiting), config.max_queued_requests, waiting.oldest_s())
    yield _of_held("queue_tokens", waiting, came)
    links = of.links.all()
    yield Stage(
        "link",
        max((link.unsent_bytes for link in links), default=0),
        MAX_OUTBOX_BYTES,
        max((link.unsent_s for link in links), default=0.0),
        {"full": sum(link.counts["outbox_full"] for link in links)},
        of.budget.retried[LINK_FULL],
    )
    used, total = fullest(of.fleet)
    yield Stage("kv", used, total, oldest_s if used else 0.0, {}, of.budget.retried[QUEUE_LONGER])
    slowest = max((link.attempts.slowest_reader() for link in links), default=(0, 0.0))
    refused = {"slow_reader": of.metrics.stream_errors("slow_reader")}
    yield Stage("output", slowest[0], config.stream_buffer_bytes, slowest[1], refused)


def fullest(fleet: Fleet) -> tuple[int, int]:
    """(blocks in use, of how many) of the replica with the largest share of them in use."""
    loads = [view.load for view in fleet.replicas() if view.load and view.load.total_blocks]
    used = [(load.total_blocks - load.free_blocks - load.cached_blocks, load) for load in loads]
    shares = [(count / load.total_blocks, count, load.total_blocks) for count, load in used]
    return max(shares, default=(0.0, 0, 0))[1:]


def register_stages(metrics: Metrics, services: Services, door: Door) -> None:
    """The table, read at each scrape."""

    def column(name: str) -> Iterable[Sample]:
        return [((stage.name,), getattr(stage, name)) for stage in stages(services, door)]

    def refused() -> Iterable[Sample]:
        for stage in stages(services, door):
            yield from (((stage.name, why), count) for why, count in stage.refused.items())

    label = ("stage",)
    metrics.gauges("stage_depth", "What a stage holds", label, lambda: column("depth"))
    metrics.gauges("stage_limit", "At most so much", label, lambda: column("limit"))
    metrics.gauges(
        "stage_oldest_seconds", "For how long already", label, lambda: column("oldest_s")
    )
    metrics.counters("stage_refused", "What it refused", ("stage", "reason"), refused)
    text = "Of what it refused, what came again"
    metrics.counters("stage_retried", text, label, lambda: column("retried"))
