"""What planning costs with a long queue: CPU time of a plan while ten thousand wait."""

from __future__ import annotations

import random

import numpy as np

from configs.schema import ServiceOrder
from events.request import SamplingParams
from kvstore.identity import KeyChain
from replica.engine.messages import EngineRequest
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, RowResult
from tools.bench.orders.replay import TimedScheduler

ROWS = 32
STEPS = 300
STEP_S = 0.02
PROMPT_TOKENS = 64


def backlog(order: ServiceOrder, waiting: int) -> dict[str, float]:
    """Decode steps of full seats; those that wait change their class as the time goes by."""
    limits = Limits(
        total_blocks=ROWS * 64,
        block_tokens=16,
        context_tokens=8_192,
        max_running=ROWS,
        max_step_tokens=ROWS * PROMPT_TOKENS,
        max_waiting_tokens=1 << 40,
    )
    scheduler, rng = TimedScheduler(limits, order), random.Random(1)
    for child in range(ROWS + waiting):
        scheduler.add(_request(child, 600.0 if child < ROWS else rng.uniform(5.0, 30.0)))
    now_s = 1.0
    for _ in range(STEPS):
        now_s += STEP_S
        plan = scheduler.plan(now_s)
        if plan is not None:
            scheduler.commit(_result(plan))
        scheduler.take_outputs()
    planned = scheduler.plan_us[10:]
    return {
        "waiting": len(scheduler.table.waiting),
        "plan_p50_us": float(np.quantile(planned, 0.5)),
        "plan_p99_us": float(np.quantile(planned, 0.99)),
    }


def _request(child: int, due_s: float) -> EngineRequest:
    """Nobody shares a prompt with anybody."""
    return EngineRequest(
        child=ChildId(child),
        prompt=tuple((child * 7_919 + place) % 49_152 for place in range(PROMPT_TOKENS)),
        chain=KeyChain(b"", child.to_bytes(16, "little")),
        params=SamplingParams(max_tokens=STEPS + 100, seed=0, temperature=0.0),
        seed=0,
        eos_ids=frozenset(),
        tenant=f"t{child % 50}",
        arrival_s=1.0,
        first_by_s=1.0 + due_s,
    )


def _result(plan: ExecutionPlan) -> ExecutionResult:
    rows = tuple(RowResult(row.child, None if row.sample is None else 5) for row in plan.rows)
    return ExecutionResult(plan_id=plan.plan_id, rows=rows, device_ms=1e3 * STEP_S)
