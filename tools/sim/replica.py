"""A replica whose device only takes time: the real scheduler, cache, digest and load report.

A step is planned, lasts as long as the device says, and is committed. While a batch only decodes
and nobody waits, its steps are all alike: they are taken in one go, and cut short when somebody
comes. That changes no token and hardly a time: the time models that the replica learns see fewer
steps, all alike, and chunks that aim at a target follow these.
"""

from __future__ import annotations

from collections.abc import Callable

from events.load import DigestShape, ReplicaLoad
from replica.engine.messages import ChildOutput, EngineRequest
from replica.engine.report import report
from replica.engine.seen import SeenDispatches
from replica.publish import load_report
from replica.residency import Numbered, Residency
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, RowResult
from replica.sched.scheduler import Scheduler
from tools.sim.clock import Agenda
from tools.sim.gaps import Gaps
from tools.sim.profiles import Device
from tools.sim.tiers import SimTiers

TOKEN = 5
"""What every step samples: answers are as long as the trace says."""


class SimReplica:
    """One life of one replica. `on_output` hears of first tokens and ends, `on_change` that there
    is something to publish. `speed` scales the device."""

    def __init__(
        self,
        name: str,
        boot: int,
        device: Device,
        scheduler: Scheduler,
        shape: DigestShape,
        agenda: Agenda,
        speed: float = 1.0,
        fast_forward: bool = True,
        tiers: SimTiers | None = None,
    ) -> None:
        self.name = name
        self.boot = boot
        self.device = device
        self.speed = speed
        self.dead = False
        self.draining = False
        self.busy_s = 0.0
        self.gaps = Gaps()
        self.residency = Residency(shape)
        self.scheduler = scheduler
        self.tiers = tiers
        self.on_output: Callable[[SimReplica, ChildOutput], None] = lambda *_: None
        self.on_change: Callable[[SimReplica], None] = lambda _: None
        self._agenda = agenda
        self._fast_forward = fast_forward
        self._seen = SeenDispatches()
        self._burst: Burst | None = None
        if tiers is not None:
            tiers.landed, tiers.written = self._landed, self._written
            tiers.prefill = lambda: scheduler.timing.prefill
            tiers.changed = lambda: self.on_change(self)

    def submit(self, request: EngineRequest) -> None:
        """A request arrives."""
        self._seen.note(request.router_boot, request.dispatch_seq)
        self.scheduler.add(request)
        self._resume()

    def die(self) -> None:
        """Nothing comes of what was running."""
        self.dead = True
        if self._burst is not None:
            self._burst.cancel()
            self._burst = None

    def deltas(self) -> list[Numbered]:
        """The cache's changes since the last call, as the publisher numbers them."""
        below = self.tiers.drain_facts() if self.tiers is not None else []
        return self.residency.apply(self.scheduler.journal.drain(), *below)

    def load(self) -> ReplicaLoad:
        """The heartbeat. Steps taken in one go end here, so that the next one tells of them."""
        if self._burst is not None:
            self._burst.cut(self._agenda.now_s)
        engine = report(
            self.scheduler,
            self._seen,
            self._agenda.now_s,
            alive=True,
            failed_plans=0,
            broken_invariants=0,
        )
        fetch = self.tiers.fetch_fits() if self.tiers is not None else ()
        return load_report(engine, self.residency, self.draining, fetch)

    def _landed(self, child: ChildId, blocks: int) -> None:
        if not self.dead:
            self.scheduler.landed(child, blocks)
            self._resume()

    def _written(self, child: ChildId, blocks: int) -> None:
        if not self.dead:
            self.scheduler.written(child, blocks)
            self._resume()

    def _resume(self) -> None:
        """Something is new: the next step takes it in."""
        self._say()
        if self._burst is None:
            self._begin()
        else:
            self._burst.cut(self._agenda.now_s)
        self.on_change(self)

    def _begin(self) -> None:
        plan = self.scheduler.plan(self._agenda.now_s)
        self._say()
        if plan is not None:
            self._burst = Burst(self, plan, self._alike(plan))

    def _alike(self, plan: ExecutionPlan) -> int:
        """How many steps like this one follow each other at most, this one included."""
        table = self.scheduler.table
        if not self._fast_forward or table.waiting or table.held:
            return 1
        block_tokens = self.scheduler.limits.block_tokens
        steps = 1 << 30
        for row in plan.rows:
            request = table.get(row.child)
            if request is None or len(row.token_ids) != 1 or row.sample is None:
                return 1
            # The last token and the one that fills a block are the scheduler's own affair.
            steps = min(steps, request.remaining - 1, block_tokens - 1 - row.start % block_tokens)
        return max(1, steps)

    def end_step(self, plan: ExecutionPlan, steps: int, took_s: float) -> None:
        """`steps` steps like the planned one are over."""
        self._burst = None
        self.busy_s += took_s
        rows = tuple(
            RowResult(row.child, None if row.sample is None else TOKEN) for row in plan.rows
        )
        step_ms = 1e3 * took_s / steps
        self.scheduler.commit(ExecutionResult(plan_id=plan.plan_id, rows=rows, device_ms=step_ms))
        if steps > 1:
            self._repeat(plan, steps - 1)
        self.gaps.add(step_ms, steps * sum(len(row.token_ids) == 1 for row in plan.rows))
        self._say()
        self.on_change(self)
        if not self.dead and self._burst is None:
            self._begin()

    def _repeat(self, plan: ExecutionPlan, steps: int) -> None:
        """What as many more commits of a decode step would have done."""
        for row in plan.rows:
            request = self.scheduler.table.get(row.child)
            assert request is not None
            request.tokens.extend([TOKEN] * steps)
            request.computed += steps
            request.committed += steps

    def _say(self) -> None:
        for output in self.scheduler.take_outputs():
            self.on_output(self, output)

    def step_s(self, plan: ExecutionPlan, ahead: int) -> float:
        """How long the planned step takes, `ahead` steps from now."""
        chunks, rows, context = [], 0, 0
        for row in plan.rows:
            if len(row.token_ids) == 1:
                rows += 1
                context += row.start + ahead
            else:
                chunks.append((row.start, len(row.token_ids)))
        return 1e-3 * self.device.step_ms(chunks, rows, context) / self.speed

    def at(self, at_s: float, act: Callable[[], None]) -> Callable[[], None]:
        """Put something on the agenda; calling what comes back takes it off."""
        return self._agenda.at(at_s, act)

    @property
    def now_s(self) -> float:
        """Simulated time."""
        return self._agenda.now_s


class Burst:
    """Steps that are alike, under way. Ends by itself, or earlier at the end of a step."""

    def __init__(self, replica: SimReplica, plan: ExecutionPlan, steps: int) -> None:
        self._replica = replica
        self._plan = plan
        self._steps = steps
        self._began_s = replica.now_s
        self._first_s = replica.step_s(plan, 0)
        self._growth_s = replica.step_s(plan, 1) - self._first_s if steps > 1 else 0.0
        self.cancel = replica.at(self._ends_s(steps), self._end)

    def cut(self, now_s: float) -> None:
        """End with the step that is running."""
        if self._steps == 1:
            return
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._ends_s(middle) < now_s:
                low = middle + 1
            else:
                high = middle
        if low < self._steps:
            self.cancel()
            self._steps = low
            self.cancel = self._replica.at(self._ends_s(low), self._end)

    def _ends_s(self, steps: int) -> float:
        return self._began_s + steps * self._first_s + self._growth_s * steps * (steps - 1) / 2

    def _end(self) -> None:
        self._replica.end_step(self._plan, self._steps, self._ends_s(self._steps) - self._began_s)
