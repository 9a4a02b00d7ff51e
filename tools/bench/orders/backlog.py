"""What planning costs with a long queue: CPU time of a step's plan while ten thousand wait.

The queues differ in what makes one hard: turns of class, a prompt that many share and one of them
computes, a head of the queue whose long prefix is cached while there is no room, seats that change
hands in every step, deadlines that pass. A plan is what the engine does before it has a step's
rows: ending those whose time is over included.
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass
from functools import partial

import numpy as np

from configs.schema import ServiceOrder
from events.request import SamplingParams
from kvstore.identity import KeyChain, block_key
from replica.engine.messages import EngineRequest
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, RowResult
from replica.sched.policies import POLICIES
from replica.sched.scheduler import Scheduler

ROWS = 32
SPARE_SEATS = 8
WARM_STEPS = 10
STEP_S = 0.02
BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
LONG = 80
"""How many of those that wait have the long prompt: more than one step looks at."""

CHUNK_TOKENS = 80
_KEY = b"bench" * 4


@dataclass(frozen=True, slots=True)
class Queue:
    """`answer`: tokens for each that runs, 0: more than it can write meanwhile. `shared`: tokens
    that the first `LONG` have in common; `warm`: they are cached, and there is no room for what
    comes behind them; else one that runs computes them. `ending`: how many have their deadline in
    each step."""

    answer: int = 0
    shared: int = 0
    warm: bool = False
    ending: int = 0


QUEUES = {
    "strangers": Queue(),
    "cold_head": Queue(shared=24_000),
    "warm_head": Queue(shared=24_000, warm=True),
    "turnover": Queue(answer=8),
    "ending": Queue(ending=2),
}


def backlog(
    order: ServiceOrder, waiting: int, steps: int, rounds: int
) -> dict[str, dict[str, float]]:
    """By queue. Every round takes the very same steps, and of each step the least counts: what
    others do on the machine meanwhile is not the plan's."""
    found = {}
    for name, queue in QUEUES.items():
        made = [_steps(order, queue, waiting, steps) for _ in range(rounds)]
        planned = np.min(made, axis=0)[min(WARM_STEPS, steps - 1) :]
        found[name] = {
            "plan_p50_us": float(np.quantile(planned, 0.5)),
            "plan_p99_us": float(np.quantile(planned, 0.99)),
            "plan_most_us": float(planned.max()),
        }
    return found


def _steps(order: ServiceOrder, queue: Queue, waiting: int, steps: int) -> list[float]:
    """CPU time of each plan, in us."""
    answer = queue.answer or steps + 100
    scheduler = Scheduler(_limits(queue, answer), partial(block_key, _KEY), POLICIES[order]())
    makes, now_s = _Maker(queue, answer), 1.0
    if queue.warm:
        scheduler.add(makes.request(shared=True, answer=1))
        while scheduler.runnable:
            _step(scheduler, now_s)
    for number in range(ROWS):
        leads = bool(queue.shared) and not queue.warm and number == 0
        scheduler.add(makes.request(shared=leads))
    for number in range(waiting):
        scheduler.add(makes.request(shared=bool(queue.shared) and number < LONG, waits=True))
    planned = []
    for _ in range(steps):
        now_s += STEP_S
        planned.append(_step(scheduler, now_s))
    return planned


def _step(scheduler: Scheduler, now_s: float) -> float:
    began = time.thread_time()
    scheduler.expire(now_s)
    plan = scheduler.plan(now_s)
    took_us = 1e6 * (time.thread_time() - began)
    if plan is not None:
        scheduler.commit(_result(plan))
    scheduler.take_outputs()
    return took_us


def _limits(queue: Queue, answer: int) -> Limits:
    room = ROWS * (PROMPT_TOKENS + answer)
    room = room + queue.shared + 8 * BLOCK_TOKENS if queue.warm else 2 * (room + queue.shared)
    return Limits(
        total_blocks=room // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=1 << 20,
        max_running=ROWS + (SPARE_SEATS if queue.shared else 0),
        max_step_tokens=ROWS + CHUNK_TOKENS if queue.shared else ROWS * PROMPT_TOKENS,
        max_waiting_tokens=1 << 40,
    )


class _Maker:
    """Requests one after the other. But for what is shared, nobody has a prompt of another."""

    def __init__(self, queue: Queue, answer: int) -> None:
        self._queue = queue
        self._answer = answer
        self._rng = random.Random(1)
        self._count = self._waiting = 0
        self._shared = tuple(place % 49_152 for place in range(queue.shared))
        tokens = array("I", self._shared).tobytes()
        width, parent, keys = 4 * BLOCK_TOKENS, b"", b""
        for start in range(0, len(tokens), width):
            parent = block_key(_KEY, parent, tokens[start : start + width])
            keys += parent
        self._chain = keys, parent

    def request(self, shared: bool = False, answer: int = 0, waits: bool = False) -> EngineRequest:
        """The next one. Those that wait change their class as the time goes by."""
        self._count += 1
        self._waiting += waits
        own = tuple((self._count * 7_919 + place) % 49_152 for place in range(PROMPT_TOKENS))
        keys, parent = self._chain if shared else (b"", self._count.to_bytes(16, "little"))
        ending = self._queue.ending if waits else 0
        due_s = self._rng.uniform(5.0, 30.0) if waits else 600.0
        return EngineRequest(
            child=ChildId(self._count),
            prompt=(*self._shared, *own) if shared else own,
            chain=KeyChain(keys, parent),
            params=SamplingParams(
                max_tokens=answer or self._answer, seed=0, temperature=0.0, ignore_eos=True
            ),
            seed=0,
            eos_ids=frozenset(),
            tenant=f"t{self._count % 50}",
            arrival_s=1.0,
            priority=int(shared),
            first_by_s=1.0 + due_s,
            deadline_s=1.0 + STEP_S * self._waiting / ending if ending else None,
        )


def _result(plan: ExecutionPlan) -> ExecutionResult:
    rows = tuple(RowResult(row.child, None if row.sample is None else 5) for row in plan.rows)
    return ExecutionResult(plan_id=plan.plan_id, rows=rows, device_ms=1e3 * STEP_S)
