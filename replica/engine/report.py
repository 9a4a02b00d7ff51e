"""The load snapshot: what the engine says about itself after each step."""

from __future__ import annotations

from replica.cache.pool import BlockState
from replica.engine.messages import EngineLoad
from replica.engine.seen import SeenDispatches
from replica.sched.scheduler import Scheduler


def report(
    scheduler: Scheduler,
    seen: SeenDispatches,
    last_step_s: float,
    alive: bool,
    failed_plans: int,
    broken_invariants: int,
) -> EngineLoad:
    """A snapshot of everything; `running` counts whoever has blocks, in whatever state."""
    pool, table, timing = scheduler.cache.pool, scheduler.table, scheduler.timing
    return EngineLoad(
        waiting=len(table.waiting),
        running=sum(map(len, (table.running, table.loading, table.held, table.writing))),
        queued_prefill_tokens=scheduler.queued_prefill_tokens(),
        running_context_tokens=scheduler.running_context_tokens(),
        free_blocks=pool.count(BlockState.FREE),
        cached_blocks=pool.count(BlockState.CACHED),
        total_blocks=scheduler.ledger.usable_blocks,
        step_ms=timing.step_ms,
        steps=timing.steps,
        prefill=timing.prefill,
        decode=timing.decode,
        seen=seen.snapshot(),
        prompt_tokens_total=scheduler.planner.prompt_tokens,
        cached_tokens_total=scheduler.planner.cached_tokens,
        preemptions_total=scheduler.lifecycle.preemptions,
        displaced=dict(scheduler.planner.displaced),
        recomputed_tokens_total=scheduler.lifecycle.recomputed_tokens,
        later=dict(scheduler.planner.later),
        never=dict(scheduler.ledger.never),
        held=dict(scheduler.lifecycle.held),
        held_requests=len(table.held),
        held_blocks=sum(len(request.blocks) for request in table.held),
        last_step_s=last_step_s,
        alive=alive,
        shadow=scheduler.service.shadow_counts(),
        failed_plans=failed_plans,
        broken_invariants=broken_invariants,
        adapters=scheduler.adapters.state(),
        warm=scheduler.cache.idle.most_resident(),
    )
