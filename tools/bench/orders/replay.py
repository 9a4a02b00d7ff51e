"""One trace under one order of service: a single replica, no router."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from configs.schema import ServiceOrder
from events.load import DigestShape, KVLayout
from kvstore.identity import Namespace, block_key
from replica.engine.messages import ChildOutput
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, ExecutionPlan
from replica.sched.policies import POLICIES
from replica.sched.scheduler import Scheduler
from tools.bench.orders.traffic import KINDS, TENANTS, Arrival, traffic
from tools.sim.call import Trace
from tools.sim.clock import Agenda
from tools.sim.profiles import Device
from tools.sim.prompt import CLUSTER_KEY
from tools.sim.replica import SimReplica

CONTEXT_TOKENS = 1 << 23
MAX_WAITING_TOKENS = 1 << 40
SHAPE = DigestShape(bits=1_024, k=8)


class TimedScheduler(Scheduler):
    """Notes the CPU time of each plan, in us."""

    def __init__(self, limits: Limits, order: ServiceOrder) -> None:
        super().__init__(limits, partial(block_key, CLUSTER_KEY), POLICIES[order]())
        self.plan_us: list[float] = []

    def plan(self, now_s: float) -> ExecutionPlan | None:
        """See Scheduler."""
        began = time.thread_time()
        plan = super().plan(now_s)
        self.plan_us.append(1e6 * (time.thread_time() - began))
        return plan


@dataclass(slots=True)
class Outcome:
    """Of one request. `ttft_s` None: refused."""

    arrival: Arrival
    ttft_s: float | None = None

    @property
    def good(self) -> bool:
        """Whether its first token came in time."""
        return self.ttft_s is not None and self.ttft_s <= self.arrival.due_s


@dataclass(slots=True)
class Replay:
    """What happened to everybody."""

    outcomes: dict[ChildId, Outcome] = field(default_factory=dict)
    cached_tokens: int = 0

    def note(self, now_s: float, output: ChildOutput) -> None:
        """An output of the replica's."""
        outcome = self.outcomes[output.child]
        if outcome.ttft_s is None and output.token_ids:
            outcome.ttft_s = now_s - outcome.arrival.request.arrival_s
            self.cached_tokens += output.cached_tokens


def replay(
    trace: Trace, device: Device, order: ServiceOrder, load: float, kv_tokens: int, seed: int
) -> dict[str, Any]:
    """Until the last request has ended; the figures."""
    limits = Limits(
        total_blocks=kv_tokens // trace.block_tokens,
        block_tokens=trace.block_tokens,
        context_tokens=CONTEXT_TOKENS,
        max_running=device.max_running,
        max_step_tokens=device.max_step_tokens,
        max_waiting_tokens=MAX_WAITING_TOKENS,
    )
    agenda, scheduler, made = Agenda(), TimedScheduler(limits, order), Replay()
    replica = SimReplica("r0", 1, device, scheduler, SHAPE, agenda)
    replica.on_output = lambda _, output: made.note(agenda.now_s, output)
    for arrival in traffic(trace, device, trace_namespace(trace), load, seed):
        made.outcomes[arrival.request.child] = Outcome(arrival)
        agenda.at(arrival.request.arrival_s, partial(replica.submit, arrival.request))
    began_s = agenda.now_s
    while agenda.step():
        pass
    return _figures(made, scheduler, agenda.now_s - began_s)


def trace_namespace(trace: Trace) -> Namespace:
    layout = KVLayout(
        dtype="bfloat16", layers=1, kv_heads=1, head_dim=1, block_tokens=trace.block_tokens, rope=""
    )
    return Namespace(model="sim", weights="0" * 16, layout=layout)


def _figures(made: Replay, scheduler: TimedScheduler, span_s: float) -> dict[str, Any]:
    outcomes = list(made.outcomes.values())
    served = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    good = sum(outcome.good for outcome in outcomes)
    prompts = sum(len(outcome.arrival.request.prompt) for outcome in outcomes)
    return {
        "slo_share": good / len(outcomes),
        "goodput_per_s": good / max(1e-9, span_s),
        "slo_share_by_kind": {
            kind.name: _share([o for o in outcomes if o.arrival.kind is kind]) for kind in KINDS
        },
        "slo_share_by_tenant": {
            name: _share([o for o in outcomes if o.arrival.request.tenant == name])
            for name in TENANTS
        },
        "refused": len(outcomes) - len(served),
        "ttft_mean_s": float(np.mean(served)),
        "ttft_p99_s": float(np.quantile(served, 0.99)),
        "longest_wait_s": max(served),
        "cached_token_ratio": made.cached_tokens / max(1, prompts),
        "preemptions": scheduler.lifecycle.preemptions,
        "plan_p50_us": float(np.quantile(scheduler.plan_us, 0.5)),
        "plan_p99_us": float(np.quantile(scheduler.plan_us, 0.99)),
    }


def _share(outcomes: list[Outcome]) -> float:
    return sum(outcome.good for outcome in outcomes) / max(1, len(outcomes))
