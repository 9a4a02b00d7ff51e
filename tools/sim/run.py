"""What came out of a simulation: one record for each call, and what the replicas counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.sim.call import Trace
from tools.sim.gaps import Gaps
from tools.sim.record import Record
from tools.sim.replica import SimReplica
from tools.sim.settings import Settings


@dataclass(frozen=True, slots=True)
class Run:
    """What came out: one record for each call, and what the replicas counted."""

    settings: Settings
    trace: str
    rate_per_s: float
    records: tuple[Record, ...]
    busy_s: dict[str, float]
    itl_p99_ms: float
    preemptions: int
    repairs: int
    span_s: float
    fetched_bytes: int = 0
    written_bytes: int = 0


def run_of(
    trace: Trace,
    settings: Settings,
    records: Sequence[Record],
    replicas: Sequence[SimReplica],
    ended_s: float,
    pace: float,
    repairs: int,
) -> Run:
    """`replicas`: all that lived, at least one; `pace`: what the trace's times were multiplied
    with; `repairs`: snapshots that lost messages made necessary."""
    busy_s = dict.fromkeys((replica.name for replica in replicas), 0.0)
    for replica in replicas:
        busy_s[replica.name] += replica.busy_s
    gaps = Gaps()
    for replica in replicas:
        gaps.update(replica.gaps)
    tiers = [replica.tiers for replica in replicas if replica.tiers is not None]
    block_bytes = trace.block_tokens * settings.device.kv_bytes_per_token
    return Run(
        settings=settings,
        trace=trace.name,
        rate_per_s=len(trace.calls) / max(1e-9, trace.span_s * pace),
        records=tuple(records),
        busy_s=busy_s,
        itl_p99_ms=gaps.quantile_ms(0.99),
        preemptions=sum(replica.scheduler.lifecycle.preemptions for replica in replicas),
        repairs=repairs,
        span_s=ended_s - records[0].arrival_s,
        fetched_bytes=block_bytes * sum(each.fetched_blocks for each in tiers),
        written_bytes=block_bytes * sum(each.written_blocks for each in tiers),
    )
