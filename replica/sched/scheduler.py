"""The scheduler: plan and commit, with everything they need wired together. One thread uses it.

A step is `plan`, then the runner's `execute`, then `commit` or `fail`. Between plan and commit
requests may come, go, pause and resume; what is in flight then is settled by the commit. While a
step executes, the next one may be made by `plan_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from configs.schema import Eviction
from events.errors import CoreError, InvariantError
from replica.cache.journal import Journal
from replica.cache.node import Node
from replica.cache.pool import BlockPool
from replica.cache.prefix import PrefixCache
from replica.engine.messages import AdapterLoader, ChildOutput, EngineRequest
from replica.sched.adapters import Adapters
from replica.sched.commit import Committer, NextKey
from replica.sched.holding import Holding
from replica.sched.ledger import Ledger, Limits
from replica.sched.lengths import OutputLengths
from replica.sched.lifecycle import Lifecycle
from replica.sched.loading import Loading
from replica.sched.order import Policy
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, PlanId
from replica.sched.planner import Planner
from replica.sched.policies.deadline import Deadline
from replica.sched.refusals import adapter_failed, queue_full, too_late, unknown_adapter
from replica.sched.request import Request, State
from replica.sched.service import Service
from replica.sched.table import RequestTable
from replica.sched.tiers import Tiers
from replica.sched.timing import Timing


class Scheduler:
    """All state of one engine but the KV itself."""

    def __init__(
        self,
        limits: Limits,
        next_key: NextKey,
        policy: Policy | None = None,
        after_commit: Callable[[Scheduler], None] | None = None,
        tiers: Tiers | None = None,
        eviction: Eviction = "segmented",
        shadow: Policy | None = None,
        prefix_cache: bool = True,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`policy`: by deadline unless given; `shadow` runs beside it."""
        self.limits = limits
        self.journal = Journal()
        pool = BlockPool(limits.total_blocks)
        self.cache = PrefixCache(
            pool, self.journal, limits.block_tokens, eviction, shares=prefix_cache
        )
        self.table = RequestTable()
        self.timing = Timing()
        self.lengths = OutputLengths(limits.horizon_tokens)
        self.ledger = Ledger(limits, self.lengths)
        self.adapters = Adapters(self.ledger, adapters)
        self.lifecycle = Lifecycle(self.table, self.cache, self.lengths, self.adapters, tiers)
        self._loading = Loading(self.ledger, self.lifecycle)
        self._holding = Holding(self.lifecycle, self.timing)
        policy = Deadline() if policy is None else policy
        self.planner = Planner(policy, self.ledger, self.lifecycle, self._loading, self.timing)
        self.service = Service(policy, shadow, self.lifecycle, self.timing)
        self.in_flight: deque[ExecutionPlan] = deque()
        self.last_plan = PlanId(0)
        self._committer = Committer(limits, self.lifecycle, next_key)
        self._spare_blocks = 0
        self._after_commit = after_commit

    @property
    def runnable(self) -> bool:
        """Whether a request waits for a step."""
        return bool(self.table.running or self.table.waiting)

    def add(self, spec: EngineRequest) -> None:
        """Take a child in; what can never run, or finds the queue full, gets its error at once."""
        request = Request(spec)
        error, hit_blocks = self._refusal(request), 0
        if error is None:
            request.found = self._find(request)
            hit_blocks = 0 if request.found is None else request.found.depth + 1
            error = self.service.enter(request, hit_blocks * self.limits.block_tokens)
        self.table.add(request)
        if error is not None:
            self.lifecycle.refuse(request, error)
            return
        self.table.expect_hit(request, hit_blocks * self.limits.block_tokens)
        self._loading.look_ahead(request, hit_blocks)

    def expire(self, now_s: float) -> None:
        """End every child whose deadline has passed."""
        for request in self.table.expired(now_s):
            self.lifecycle.refuse(request, too_late())

    def plan(self, now_s: float) -> ExecutionPlan | None:
        """The next step, or None when nothing can run. Raises InvariantError while one is open."""
        if self.in_flight:
            raise InvariantError(f"plan {self.in_flight[0].plan_id} is still in flight")
        return self._plan(now_s)

    def plan_ahead(self, now_s: float) -> ExecutionPlan | None:
        """The step behind the one in flight, to be executed only if that one doesn't fail.

        None when it has to be known first how that one ends. Raises InvariantError unless exactly
        one plan is in flight.
        """
        if len(self.in_flight) != 1:
            raise InvariantError(f"{len(self.in_flight)} plans are in flight, not one")
        return self._plan(now_s, ahead=True)

    def commit(self, result: ExecutionResult) -> None:
        """Take in the result of the oldest plan in flight. Raises InvariantError for any other."""
        plan = self._landing()
        self._committer.commit(plan, result)
        self.in_flight.popleft()
        self.timing.observe(plan, result.device_ms)
        self._landed()

    def fail(self) -> None:
        """The oldest plan in flight raised: nothing of it was computed.

        What was planned behind it builds on it, and is called off.
        """
        self._committer.fail(self._landing())
        self.in_flight.popleft()
        while self.in_flight:
            self._committer.call_off(self.in_flight.popleft())
        self._landed()

    def landed(self, child: ChildId, blocks: int) -> None:
        """The one terminal event of a child's load: so many leading blocks came, verified.

        Raises InvariantError when none of that child was under way.
        """
        request = self.table.get(child)
        if request is None or not request.transfers:
            raise InvariantError(f"no load of child {child} is under way")
        self._loading.end(request)
        if not request.over:
            self._committer.take_loaded(request, blocks)
            self.planner.credit(request, blocks * self.limits.block_tokens)
            self.table.move(request, State.HELD if request.on_hold else State.RUNNING)
        self.lifecycle.settle(request)

    def written(self, child: ChildId, blocks: int) -> None:
        """The one terminal event of what a child had written out: so many leading blocks of its
        prompt are in the store.

        Raises InvariantError when none of that child was under way.
        """
        request = self.table.get(child)
        if request is None or not request.transfers:
            raise InvariantError(f"no write of child {child} is under way")
        request.transfers -= 1
        if not request.over:
            self.lifecycle.wrote(request, blocks)
        else:
            self.lifecycle.settle(request)

    def adapter_landed(self, name: str, loaded: bool) -> None:
        """The one terminal event of an adapter's load; where it failed, whoever waits for it gets
        an error. Raises InvariantError when none was under way."""
        self.adapters.landed(name, loaded)
        if loaded:
            return
        for request in [each for each in self.table.waiting if each.adapter == name]:
            error = adapter_failed(name, started=request.generated > 0)
            self.lifecycle.refuse(request, error)

    def take_outputs(self) -> tuple[ChildOutput, ...]:
        """Outputs since the last call, at most one per child if called after each phase."""
        outputs = tuple(self.lifecycle.outputs)
        self.lifecycle.outputs.clear()
        return outputs

    def clear_cache(self, limit_blocks: int | None = None) -> int:
        """Drop every cached block that nobody uses; returns how many.

        From then on at most `limit_blocks` blocks are used, as soon as those in use allow it.
        """
        dropped = self.cache.clear()
        total = self.limits.total_blocks
        self._spare_blocks = 0 if limit_blocks is None else max(total - max(limit_blocks, 1), 0)
        self._park()
        return dropped

    def queued_prefill_tokens(self) -> int:
        """Tokens that wait for prefill, less what the cache holds of them as far as known."""
        queued = self.table.waiting_tokens - self.table.waiting_hit_tokens
        started = (*self.table.running, *self.table.loading)
        return queued + sum(request.debt for request in started if request.debt > 1)

    def drain_ms(self) -> float:
        """How long the queued prefill will take."""
        return self.timing.prefill.predict_ms(0, self.queued_prefill_tokens())

    def running_context_tokens(self) -> int:
        """Tokens in the KV of running requests."""
        return sum(request.committed for request in self.table.running)

    def _landing(self) -> ExecutionPlan:
        if not self.in_flight:
            raise InvariantError("no plan is in flight")
        return self.in_flight[0]

    def _plan(self, now_s: float, ahead: bool = False) -> ExecutionPlan | None:
        self.service.advance(now_s)
        planner = self.planner
        self._holding.review(
            now_s, self.ledger.usable_blocks, planner.short_of_blocks, planner.short_of_places
        )
        plan = planner.plan(PlanId(self.last_plan + 1), now_s, ahead)
        self.service.started(planner.take_started())
        if plan is not None:
            self.last_plan = plan.plan_id
            self.in_flight.append(plan)
        return plan

    def _landed(self) -> None:
        if len(self.cache.parked) < self._spare_blocks:
            self._park()
        if self._after_commit is not None:
            self._after_commit(self)

    def _park(self) -> None:
        parked = self.cache.park(self._spare_blocks)
        self.ledger.usable_blocks = self.limits.total_blocks - parked

    def _find(self, request: Request) -> Node | None:
        """The last block of it that the cache holds now."""
        limit = request.cache_limit // self.limits.block_tokens
        return self.cache.match(request.keys, request.tokens.tobytes(), limit)

    def _refusal(self, request: Request) -> CoreError | None:
        """Why it is not taken in. An empty queue takes it, however long it is."""
        never = self.ledger.intake(request.spec)
        if never is not None:
            return never.error
        if request.adapter and not self.adapters.knows(request.adapter):
            return unknown_adapter(request.adapter)
        table, most = self.table, self.limits.max_waiting_tokens
        if table.waiting and table.waiting_tokens + len(request.tokens) > most:
            return queue_full(self.drain_ms())
        return None
