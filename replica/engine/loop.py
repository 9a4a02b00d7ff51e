"""The engine thread: inbox, plan, execute, commit, sink, over and over; asleep when idle.

Everything behind `Engine`'s methods happens on this one thread; callers only leave word in the
inbox. The inbox is read once more between execute and commit, so that an abort that came during a
step wins over the step's token. With overlap the next step is planned while one executes, and
starts before that one is committed.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread

from configs.schema import ReplicaConfig
from events.cache import CacheFact
from events.errors import InvariantError, WarmrouteError
from kvstore.identity import block_key
from replica.engine.gate import OutputGate
from replica.engine.inbox import Inbox, Posted, Word
from replica.engine.launcher import Launcher, ThreadLauncher
from replica.engine.messages import (
    AdapterLoader,
    EngineLoad,
    EngineRequest,
    EngineTiers,
    StepSink,
)
from replica.engine.report import report
from replica.engine.seen import SeenDispatches
from replica.sched.invariants import check_scheduler
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, Runner
from replica.sched.policies import POLICIES
from replica.sched.refusals import engine_failure, queue_full
from replica.sched.scheduler import Scheduler
from replica.sched.table import NEVER_S

MAX_FAILED_PLANS = 64
"""Plans in a row that may fail before the device counts as lost: more than a few bad requests."""

CLEAR_TIMEOUT_S = 60.0
STALL_S = 0.01
IDLE_CHECK_S = 10.0

_log = logging.getLogger("replica.engine")


class DeviceLostError(WarmrouteError):
    """The runner fails whatever it is given."""


class EngineThread:
    """Implements `Engine`. Owns the runner from `start` on, and closes it at the end."""

    def __init__(
        self,
        runner: Runner,
        sink: StepSink,
        config: ReplicaConfig,
        cluster_key: bytes,
        check: bool = False,
        tiers: EngineTiers | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`check`: test every invariant after every commit (slow; for tests). `tiers` are started
        and closed with the engine; so are `adapters`."""
        self.scheduler = Scheduler(
            Limits(
                total_blocks=runner.total_blocks,
                block_tokens=runner.block_tokens,
                context_tokens=config.context_tokens,
                max_running=config.max_running,
                max_step_tokens=config.max_step_tokens,
                max_waiting_tokens=config.max_waiting_tokens,
                itl_target_ms=config.itl_target_ms,
                batching=config.batching,
                retract_every_steps=config.retract_every_steps,
                max_adapters=config.max_adapters,
                max_adapters_per_batch=config.max_adapters_per_batch,
            ),
            next_key=partial(block_key, cluster_key),
            after_commit=check_scheduler if check else None,
            policy=POLICIES[config.order](),
            eviction=config.eviction,
            prefix_cache=config.prefix_cache,
            tiers=tiers,
            shadow=POLICIES[config.shadow_order]() if config.shadow_order else None,
            adapters=adapters,
        )
        self._tiers = tiers
        self._adapters = adapters
        self._broken_invariants = 0
        self._failed_plans = 0
        self._runner = runner
        self._overlap = config.overlap
        self._launcher = ThreadLauncher(runner) if config.overlap else Launcher(runner)
        self._gate = OutputGate(sink)
        self._inbox = Inbox(config.max_waiting_tokens)
        self._seen = SeenDispatches()
        self._failures_in_a_row = 0
        self._stepped_s = self._checked_s = time.monotonic()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._load = self._report()

    def start(self) -> None:
        """Start the thread, and the tiers' threads before it."""
        if self._tiers is not None:
            self._tiers.attach(
                self._landed, lambda: self._load.prefill, self._generation, self._written
            )
            self._tiers.start()
        if self._adapters is not None:
            self._adapters.attach(self._adapter_landed)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step; every open child ends with an error. Idempotent.

        A runner that hangs longer than `timeout_s` is left behind on its daemon thread.
        """
        self._inbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._die()

    def submit(self, request: EngineRequest) -> None:
        """See Engine.submit. Raises InvariantError when the child is already open."""
        self._gate.enter(request.child)
        posted = self._inbox.post(Word(partial(self._take_in, request), request.known_tokens))
        if posted is Posted.SHUT:
            self._gate.shut(self.scheduler.last_plan)
        elif posted is Posted.FULL:
            load = self._load
            error = queue_full(load.prefill.predict_ms(0, load.queued_prefill_tokens))
            self._gate.refuse(self.scheduler.last_plan, request.child, error)

    def abort(self, child: ChildId, answered: bool = False) -> None:
        """See Engine.abort."""
        self._post(partial(self.scheduler.lifecycle.abort, child, answered))

    def hold(self, child: ChildId) -> None:
        """See Engine.hold."""
        self._post(partial(self.scheduler.lifecycle.hold, child))

    def resume(self, child: ChildId) -> None:
        """See Engine.resume."""
        self._post(partial(self.scheduler.lifecycle.resume, child))

    def clear_cache(self, limit_blocks: int | None = None, below: bool = True) -> int:
        """See Engine.clear_cache; 0 from a dead engine. Raises TimeoutError when it hangs."""
        cleared: Future[int] = Future()

        def clear() -> None:
            cleared.set_result(self.scheduler.clear_cache(limit_blocks))

        word = Word(clear, reply=cleared)
        if self._inbox.post(word) is Posted.SHUT:
            return 0
        if below and self._tiers is not None:
            self._tiers.rest(limit_blocks is not None)
        dropped = cleared.result(CLEAR_TIMEOUT_S)
        if below and self._tiers is not None:
            self._tiers.clear()
        return dropped

    def drain_facts(self) -> list[CacheFact]:
        """See Engine.drain_facts."""
        return self.scheduler.journal.drain()

    def load(self) -> EngineLoad:
        """See Engine.load."""
        return self._load

    def open_children(self) -> int:
        """Children that are still owed a finish."""
        return len(self._gate)

    def _landed(self, child: ChildId, blocks: int) -> None:
        """The terminal event of a load, from any thread."""
        self._post(partial(self.scheduler.landed, child, blocks))

    def _written(self, child: ChildId, blocks: int) -> None:
        """The terminal event of a write, from any thread."""
        self._post(partial(self.scheduler.written, child, blocks))

    def _adapter_landed(self, name: str, loaded: bool) -> None:
        """The terminal event of an adapter's load, from any thread."""
        self._post(partial(self.scheduler.adapter_landed, name, loaded))

    def _generation(self, block: int) -> int:
        return self.scheduler.cache.pool.generation(block)

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.post(Word(command))

    def _run(self) -> None:
        try:
            while not self._inbox.stopping:
                self._inbox.carry_out()
                if not self._step():
                    self._inbox.wait(self._nap_s())
        except Exception as error:
            _log.critical("the engine stops: %s", _cause(error))
        finally:
            self._die()
            self._launcher.close()
            if self._tiers is not None:
                self._tiers.close()
            if self._adapters is not None:
                self._adapters.close()
            self._runner.close()

    def _step(self) -> bool:
        """Plan, execute, commit. False when there was nothing to do."""
        now_s = time.monotonic()
        self.scheduler.expire(now_s)
        plan = self.scheduler.plan(now_s)
        self._flush()
        if plan is None:
            self._check_when_idle(now_s)
            return False
        self._execute(plan)
        return True

    def _execute(self, plan: ExecutionPlan) -> None:
        """This plan, and those that can be made while the one before them executes."""
        launched: Future[ExecutionResult] | None = self._launcher.launch(plan)
        while launched is not None:
            ahead = self._plan_ahead()
            done, error = launched, launched.exception()
            launched = None if ahead is None or error else self._launcher.launch(ahead)
            self._inbox.carry_out()
            if error is None:
                self._commit(done.result())
            else:
                self._fail(error)
            self._flush()

    def _plan_ahead(self) -> ExecutionPlan | None:
        if not self._overlap or self._inbox.stopping:
            return None
        self._inbox.carry_out()
        now_s = time.monotonic()
        self.scheduler.expire(now_s)
        plan = self.scheduler.plan_ahead(now_s)
        self._flush()
        return plan

    def _commit(self, result: ExecutionResult) -> None:
        self.scheduler.commit(result)
        self._failures_in_a_row = 0
        self._stepped_s = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        plan = self.scheduler.in_flight[0]
        _log.error("plan %d (%d rows) failed: %s", plan.plan_id, len(plan.rows), _cause(error))
        error.__traceback__ = None  # its frames hold the plan, and the error itself
        self.scheduler.fail()
        self._failed_plans += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILED_PLANS:
            raise DeviceLostError(f"{MAX_FAILED_PLANS} plans in a row failed")

    def _take_in(self, request: EngineRequest) -> None:
        self._seen.note(request.router_boot, request.dispatch_seq)
        try:
            self.scheduler.add(request)
        except (ValueError, OverflowError, TypeError) as error:
            _log.error("child %d can't be taken in: %s", request.child, _cause(error))
            self._gate.refuse(self.scheduler.last_plan, request.child, engine_failure())

    def _flush(self) -> None:
        self._load = self._report()
        outputs = self.scheduler.take_outputs()
        if outputs:
            self._gate.send(self.scheduler.last_plan, outputs)

    def _nap_s(self) -> float | None:
        """How long to sleep at most; None for as long as nobody calls."""
        if self.scheduler.runnable:
            return STALL_S
        deadline_s = self.scheduler.table.next_deadline_s
        return None if deadline_s == NEVER_S else max(deadline_s - time.monotonic(), 0.0)

    def _check_when_idle(self, now_s: float) -> None:
        if now_s - self._checked_s < IDLE_CHECK_S:
            return
        self._checked_s = now_s
        try:
            check_scheduler(self.scheduler)
        except InvariantError as error:
            self._broken_invariants += 1
            self._load = self._report()
            _log.error("broken invariant: %s", error)

    def _die(self) -> None:
        """No more words, no more steps: whoever is still open gets its end. Idempotent."""
        self._inbox.shut()
        self._load = self._report()
        self._gate.shut(self.scheduler.last_plan)

    def _report(self) -> EngineLoad:
        alive = not self._inbox.shut_down
        return report(
            self.scheduler,
            self._seen,
            self._stepped_s,
            alive,
            self._failed_plans,
            self._broken_invariants,
        )


def _cause(error: BaseException) -> str:
    """Kind and place of an error. Its text only if it is ours: another's may quote tokens."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].name}:{frames[-1].lineno}" if frames else ""
    text = f" ({error})" if isinstance(error, WarmrouteError) else ""
    return f"{type(error).__name__}{text}{place}"
