"""Real runners under every kind of schedule: the scheduler by hand, without thread or sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from replica.engine.messages import EngineRequest
from replica.sched.invariants import check_scheduler
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, Runner
from replica.sched.scheduler import Scheduler
from tests.replica.sched.rig import chain_of, real_key, sampling


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


@dataclass
class Outcome:
    """Tokens of each prompt, and what the schedule did for them."""

    tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    preemptions: int = 0
    plans: int = 0
    ahead: int = 0


def request_of(child: int, prompt: Sequence[int], wanted: int, block_tokens: int) -> EngineRequest:
    """A greedy child that no end token stops."""
    return EngineRequest(
        child=ChildId(child),
        prompt=tuple(prompt),
        chain=chain_of(prompt, block_tokens),
        params=sampling(wanted),
        seed=0,
        eos_ids=frozenset(),
        tenant="t",
        arrival_s=float(child),
    )


class Engine:
    """One scheduler over one runner; what it cached stays from one `run` to the next."""

    def __init__(self, runner: Runner, schedule: Schedule) -> None:
        self.runner = runner
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
            ),
            real_key,
        )
        self._children = 0

    def run(self, prompts: Sequence[Sequence[int]], wanted: int) -> Outcome:
        """All prompts at once, to their end."""
        scheduler, outcome = self.scheduler, Outcome()
        before = scheduler.lifecycle.preemptions
        first = self._children
        for prompt in prompts:
            request = request_of(self._children, prompt, wanted, self.runner.block_tokens)
            scheduler.add(request)
            self._children += 1
        outcome.tokens = [[] for _ in prompts]
        outcome.cached_tokens = [0 for _ in prompts]
        while scheduler.runnable or scheduler.in_flight:
            plan = scheduler.in_flight[0] if scheduler.in_flight else scheduler.plan(1.0)
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
