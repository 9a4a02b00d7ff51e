"""Real runners under every kind of schedule: the scheduler by hand, without thread or sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from replica.engine.messages import AdapterLoader, EngineRequest
from replica.sched.invariants import check_scheduler
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, Runner
from replica.sched.scheduler import Scheduler
from tests.replica.sched.rig import ROOT, chain_of, real_key, sampling


@dataclass
class Schedule:
    """Knobs of one schedule. A small `total_blocks` and `horizon_tokens` force preemptions, and
    `retract_every_steps` does."""

    total_blocks: int | None = None
    max_running: int = 16
    max_step_tokens: int = 512
    horizon_tokens: int = 64
    retract_every_steps: int = 0
    overlap: bool = False
    max_adapters: int = 2


@dataclass
class Outcome:
    """Tokens of each prompt, and what the schedule did for them."""

    tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    preemptions: int = 0
    plans: int = 0
    ahead: int = 0


def request_of(
    child: int, prompt: Sequence[int], wanted: int, block_tokens: int, adapter: str = ""
) -> EngineRequest:
    """A greedy child that no end token stops."""
    return EngineRequest(
        child=ChildId(child),
        prompt=tuple(prompt),
        chain=chain_of(prompt, block_tokens, root=ROOT + adapter.encode()),
        adapter=(adapter, "digest") if adapter else None,
        params=sampling(wanted),
        seed=0,
        eos_ids=frozenset(),
        tenant="t",
        arrival_s=float(child),
    )


class Engine:
    """One scheduler over one runner; what it cached stays from one `run` to the next."""

    def __init__(
        self, runner: Runner, schedule: Schedule, adapters: AdapterLoader | None = None
    ) -> None:
        self.runner = runner
        self._landed: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        if adapters is not None:
            adapters.attach(lambda name, loaded: self._landed.put((name, loaded)))
        self._overlap = schedule.overlap
        self.scheduler = Scheduler(
            Limits(
                total_blocks=schedule.total_blocks or runner.total_blocks,
                block_tokens=runner.block_tokens,
                context_tokens=1 << 20,
                max_running=schedule.max_running,
                max_step_tokens=schedule.max_step_tokens,
                max_waiting_tokens=1 << 30,
                horizon_tokens=schedule.horizon_tokens,
                retract_every_steps=schedule.retract_every_steps,
                max_adapters=schedule.max_adapters,
                max_adapters_per_batch=schedule.max_adapters,
            ),
            real_key,
            adapters=adapters,
        )
        self._children = 0

    def run(
        self, prompts: Sequence[Sequence[int]], wanted: int, adapters: Sequence[str] = ()
    ) -> Outcome:
        """All prompts at once, to their end; each with its adapter, where there are any."""
        scheduler, outcome = self.scheduler, Outcome()
        before = scheduler.lifecycle.preemptions
        first = self._children
        for prompt, adapter in zip(prompts, adapters or [""] * len(prompts), strict=True):
            size = self.runner.block_tokens
            scheduler.add(request_of(self._children, prompt, wanted, size, adapter))
            self._children += 1
        outcome.tokens = [[] for _ in prompts]
        outcome.cached_tokens = [0 for _ in prompts]
        while scheduler.runnable or scheduler.in_flight:
            plan = scheduler.in_flight[0] if scheduler.in_flight else scheduler.plan(1.0)
            if scheduler.adapters.loading and (plan is None or not self._landed.empty()):
                scheduler.adapter_landed(*self._landed.get(timeout=60))
            if plan is not None:
                outcome.plans += 1
                if self._overlap:
                    outcome.ahead += scheduler.plan_ahead(1.0) is not None
                scheduler.commit(self.runner.execute(plan))
            for output in scheduler.take_outputs():
                assert output.error is None
                outcome.tokens[output.child - first] += output.token_ids
                outcome.cached_tokens[output.child - first] = output.cached_tokens
        outcome.preemptions = scheduler.lifecycle.preemptions - before
        check_scheduler(scheduler)
        return outcome
