"""The promises of the scheduler, checked after every commit in tests and on idle in production.

Raises InvariantError that names the broken one. O(blocks + requests): not for every step.
"""

from __future__ import annotations

from collections import Counter

from replica.cache.invariants import check_cache, require
from replica.sched.plan import ChildId, PlanRow
from replica.sched.request import Request, State
from replica.sched.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Everything that holds whenever nobody is in the middle of a change."""
    requests = list(scheduler.table)
    check_cache(scheduler.cache, [request.blocks for request in requests])
    _check_lists(scheduler, requests)
    _check_flight(scheduler, requests)
    _check_adapters(scheduler, requests)
    for request in requests:
        _check_progress(scheduler, request)


def _check_lists(scheduler: Scheduler, requests: list[Request]) -> None:
    table = scheduler.table
    for state, members in (
        (State.QUEUED, table.waiting),
        (State.LOADING, table.loading),
        (State.RUNNING, table.running),
        (State.HELD, table.held),
        (State.WRITING, table.writing),
    ):
        listed = sorted((r for r in requests if r.state is state), key=lambda r: r.rank)
        require(listed == members, f"{state.name} requests are listed in service order")
    waiting = sum(len(request.tokens) for request in table.waiting)
    require(table.waiting_tokens == waiting, "waiting tokens add up")
    hits = sum(request.expected_hit for request in table.waiting)
    require(table.waiting_hit_tokens == hits, "expected hits add up")
    require(State.GONE not in {r.state for r in requests}, "who is gone is forgotten")


def _check_adapters(scheduler: Scheduler, requests: list[Request]) -> None:
    adapters, limits = scheduler.adapters, scheduler.limits
    held = Counter(request.adapter for request in requests if request.holds_adapter)
    counted = +Counter(adapters.references)
    require(held == counted, "references to adapters are counted right")
    require(len(held) <= limits.max_adapters_per_batch, "as many adapters in use as may be")
    there = len(adapters.references) + len(adapters.loading)
    require(there <= limits.max_adapters, "as many adapters in memory as may be")
    for request in requests:
        holds = bool(request.blocks or request.in_flight) and bool(request.adapter)
        require(request.holds_adapter >= holds, "whoever has KV keeps its adapter")


def _check_flight(scheduler: Scheduler, requests: list[Request]) -> None:
    rows: dict[ChildId, list[PlanRow]] = {request.child: [] for request in requests}
    require(len(scheduler.in_flight) <= 2, "one plan executes, and one is ready")
    for plan in scheduler.in_flight:
        require(len({row.child for row in plan.rows}) == len(plan.rows), "one row per child")
        require(plan.tokens <= scheduler.limits.max_step_tokens, "a step keeps its token budget")
        require(len(plan.rows) <= scheduler.limits.max_running, "a step keeps its row budget")
        for row in plan.rows:
            rows[row.child].append(row)
    for request in requests:
        flying = rows[request.child]
        require(request.in_flight == len(flying), "rows in flight are counted right")
        if request.state in (State.DRAINING, State.ABORTING, State.FINISHING):
            waits = request.in_flight > 0 or request.transfers > 0
            require(waits, "leaving requests only wait for rows in flight and transfers")
        moving = request.state in (State.LOADING, State.WRITING)
        require(moving <= request.transfers <= 1, "transfers are counted right")
        require(not (request.transfers and request.in_flight), "no row while blocks are moved")
        sampled = sum(row.sample is not None for row in flying)
        require(request.placeholders == sampled, "a placeholder for each sampled row in flight")
        for row in flying:
            held = request.blocks[: len(row.block_ids)]
            require(row.incarnation == request.incarnation, "rows belong to the incarnation")
            require(list(row.block_ids) == held, "a block in flight stays in its table")


def _check_progress(scheduler: Scheduler, request: Request) -> None:
    size = scheduler.limits.block_tokens
    known = len(request.tokens) + request.placeholders
    require(request.committed <= request.computed <= known, "committed <= computed <= known")
    require(request.computed <= len(request.blocks) * size, "computed tokens have their blocks")
    require(len(request.nodes) <= request.committed // size, "published <= committed")
    if not request.in_flight:
        require(request.computed == request.committed, "what came back is committed or undone")
        require(request.debt >= 1, "there is always a token to compute")
        full = len(request.nodes) == request.committed // size
        require(full or request.sealed, "all committed full blocks are published")
    require(
        request.cached_tokens < request.prompt_tokens, "the last prompt token is always computed"
    )
    for block, node in zip(request.blocks, request.nodes, strict=False):
        require(block in node.copies, "a published block is a copy of its node")
    if request.state is State.QUEUED:
        held = request.blocks or request.holds_adapter
        require(not held, "waiting requests hold neither blocks nor an adapter")
