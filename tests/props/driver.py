"""What the machines say to pool, cache and scheduler, and what happened; every promise is checked
after every commit.

The machine may be in the middle of a step at any time, with the next one planned already: words
that come then meet a late commit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from configs.schema import WARM_SHARE
from events.errors import ADAPTER_LOAD_FAILED, ADAPTER_NOT_FINITE
from replica.engine.messages import EngineRequest
from replica.sched.invariants import check_scheduler
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult
from replica.sched.request import Request, State
from tests.fakes.grammar import FakeGrammar
from tests.fakes.runner import NON_FINITE, FakeRunnerError
from tests.replica.cache.test_journal import replay
from tests.replica.sched.rig import Bench, sampling, tokens_of

MOST_LIVE = 12
"""Requests at once, beyond which none is added."""


class Wish(NamedTuple):
    """What a request may ask for beside its tokens: a share, promises, a form. Times in s from when
    it comes; the bench's steps take one each. `grammar`: of FakeGrammar, behind the prompt."""

    weight: float = 1.0
    warm_share: float = WARM_SHARE
    first_s: float | None = None
    end_s: float | None = None
    itl_ms: float | None = None
    grammar: tuple[int, int | None] | None = None


PLAIN = Wish()

WISHES = {
    "weight": (1.0, 0.5, 4.0),
    "warm_share": (WARM_SHARE, 0.0, 0.2, 1.0),
    "first_s": (None, None, 0.5, 4.0, 12.0),
    "end_s": (None, None, None, 3.0, 25.0),
    "itl_ms": (None, None, 250.0),
    "grammar": (None, None, None, (2, None), (4, None), (6, 3)),
}

CAUSES: dict[str, Callable[[EngineRequest], bool]] = {
    "engine_error": lambda spec: True,
    "context_length_exceeded": lambda spec: True,
    "deadline": lambda spec: spec.first_by_s is not None,
    "deadline_exceeded": lambda spec: spec.deadline_s is not None,
    "grammar_too_complex": lambda spec: getattr(spec.grammar, "gives_up_at", None) is not None,
    ADAPTER_LOAD_FAILED: lambda spec: spec.adapter is not None,
    ADAPTER_NOT_FINITE: lambda spec: spec.adapter is not None,
}
"""Which requests may end with which error, but for those whose reader was slow."""


ADAPTERS = ("", "a", "b", "c")
"""What requests compute with, where there are adapters."""

ADAPTER_EVENTS = ("adapter loaded", "adapter failed", "adapter dropped")

EVENTS = (
    "planned ahead",
    "committed",
    "committed late",
    "failed",
    "called off",
    "row failed",
    "aborted",
    "aborted in flight",
    "held",
    "held in flight",
    "resumed with KV",
    "resumed without KV",
    "preempted",
    "preempted in flight",
    "preempted by the scheduler",
    "KV of a held one released",
    "a held one ended by its cost",
    "evicted",
    "cleared",
    "blocks parked",
    "loaded",
    "loaded in part",
    "load failed",
    "written out",
    "deadline passed",
    "grammar gave up",
)
"""What has to happen somewhere in a run: a word that is said to nobody tests nothing."""


class Driver:
    """What both machines do, with the bookkeeping of who was ended from outside.

    `met` counts what really happened, by EVENTS, and as "words" what was said with some effect.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.met: Counter[str] = Counter()
        self.flying: deque[ExecutionPlan] = deque()
        self.result: ExecutionResult | None = None
        self.spoilt: set[int] = set()
        self.ended: set[int] = set()
        self.published: set[bytes] = set()
        self.held: set[int] = set()
        self._limited = False
        self._meanwhile = 0

    @property
    def live(self) -> list[Request]:
        """Those that have not ended, as far as they know."""
        return [request for request in self.bench.scheduler.table if not request.over]

    def pick(self, place: int) -> Request:
        """One of them."""
        live = self.live
        return live[place % len(live)]

    def add(self, family: int, length: int, wanted: int, skip: bool, wish: Wish = PLAIN) -> None:
        prompt = (*tokens_of(family, length), *tokens_of(family + length % 2, 2))
        params = sampling(
            wanted,
            temperature=0.5 if wanted % 3 == 0 else 0.0,
            presence_penalty=0.5 if length % 4 == 0 else 0.0,
            min_tokens=wanted // 2 if length % 5 == 0 else 0,
            ignore_eos=length % 6 == 0,
        )
        # Tenants that ask for the same share their blocks, as those of a public prefix do.
        fields = {"skip_cache_read": skip, "tenant": f"t{wanted % 3}", "priority": length % 7 // 5}
        if wanted == 1 and length % 2:
            fields["write_to"] = "a store"
        now_s = self.bench.now_s
        fields |= {"weight": wish.weight, "warm_share": wish.warm_share, "itl_ms": wish.itl_ms}
        fields["arrival_s"] = now_s
        fields["first_by_s"] = None if wish.first_s is None else now_s + wish.first_s
        fields["deadline_s"] = None if wish.end_s is None else now_s + wish.end_s
        if wish.grammar is not None:
            fields["grammar"] = FakeGrammar(len(prompt), *wish.grammar)
        if self.bench.adapters is not None:
            fields["adapter"] = ADAPTERS[(length + wanted) % len(ADAPTERS)]
        self.bench.add(prompt, params, **fields)
        self._met("added")

    def begin(self) -> None:
        """A plan, or the one behind it."""
        scheduler = self.bench.scheduler
        if not self.flying:
            plan = self.bench.plan()
            self._meanwhile = 0
        elif len(self.flying) == 1 and self.result is None:
            plan = scheduler.plan_ahead(self.bench.now_s)
            self.bench.collect()
            self.met["planned ahead"] += plan is not None
        else:
            return
        if plan is not None:
            self.met["words"] += 1
            self.flying.append(plan)

    def execute(self, fails: bool = False, spoils: bool = False) -> None:
        """The oldest plan; its outcome is not told before `end`, unless it raises."""
        if not self.flying or self.result is not None:
            return
        plan, faults = self.flying[0], self.bench.runner.faults
        if fails:
            faults.raise_on.add(plan.plan_id)
        if spoils:
            faults.row_errors[plan.rows[-1].child] = NON_FINITE
            self.spoilt.add(plan.rows[-1].child)
            self.met["row failed"] += 1
        try:
            self.result = self.bench.runner.execute(plan)
        except FakeRunnerError:
            assert fails
            self.met["failed"] += 1
            self.met["called off"] += len(self.flying) - 1
            self.bench.scheduler.fail()
            self.bench.collect()
            self.flying.clear()
        faults.row_errors.clear()

    def end(self, fails: bool = False) -> None:
        """The oldest plan is committed, or fails."""
        self.execute(fails)
        if self.result is not None:
            self.met["words"] += 1
            self.met["committed"] += 1
            self.met["committed late"] += self._meanwhile > 0
            self.bench.scheduler.commit(self.result)
            self.bench.collect()
            self.flying.popleft()
            self.result = None

    def steps(self, count: int) -> None:
        """Whole ones, one behind the other."""
        for _ in range(count):
            self.begin()
            self.end()

    def abort(self, request: Request) -> None:
        self._met("aborted", request)
        self.ended.add(request.child)
        self.bench.scheduler.lifecycle.abort(request.child)
        self.bench.collect()

    def hold(self, request: Request) -> None:
        self._met("held", request)
        self.bench.scheduler.lifecycle.hold(request.child)
        self.held.add(request.child)

    def resume(self, request: Request) -> None:
        if request.state is State.HELD:
            self._met("resumed with KV" if request.blocks else "resumed without KV")
        self.bench.scheduler.lifecycle.resume(request.child)

    def pause(self, request: Request) -> None:
        """Its reader stops for a moment."""
        self.hold(request)
        self.steps(1)
        self.resume(request)

    def dawdle(self, request: Request, steps: int) -> None:
        """Its reader stops whenever it has KV, until that has become too dear for those who wait:
        the worst that a reader can do. There is always somebody who waits."""
        table = self.bench.scheduler.table
        for step in range(steps):
            if not table.waiting and len(table) < MOST_LIVE:
                self.add(4 + step, 12, 12, skip=True)
            if request.on_hold and not request.blocks:
                self.resume(request)
            elif request.blocks and not request.on_hold:
                self.hold(request)
            self.steps(1)

    def wait(self, seconds: float) -> None:
        """Time goes by, and nothing else."""
        self.bench.now_s += seconds
        self.bench.scheduler.expire(self.bench.now_s)
        self.bench.collect()

    def preempt(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self._met("preempted", request)
            self.bench.scheduler.lifecycle.preempt(request)

    def evict(self, blocks: int) -> None:
        cache = self.bench.scheduler.cache
        before = len(cache.nodes())
        cache.release(cache.allocate(min(blocks, cache.available)))
        if len(cache.nodes()) < before:
            self._met("evicted")

    def clear(self, limit_blocks: int | None) -> None:
        total = self.bench.limits.total_blocks
        self._limited = limit_blocks is not None and limit_blocks < total
        if self.bench.scheduler.clear_cache(limit_blocks):
            self._met("cleared")
        self.met["blocks parked"] += bool(self.bench.scheduler.cache.parked)

    def land(self, blocks: int) -> None:
        """What is under way comes; without a block it has failed."""
        tiers, adapters = self.bench.tiers, self.bench.adapters
        if adapters is not None and adapters.open:
            adapters.finish(adapters.open[0], loaded=blocks > 0)
            self._met("adapter loaded" if blocks else "adapter failed")
            self.bench.collect()
        if tiers is not None and tiers.open:
            child, (wanted, _) = next(iter(tiers.open.items()))
            came = tiers.finish(child, blocks)
            part = "loaded" if came == wanted.blocks else "loaded in part"
            self._met(part if came else "load failed")
        elif tiers is not None and tiers.writing:
            tiers.wrote(next(iter(tiers.writing)), blocks)
            self._met("written out")
            self.bench.collect()

    def _met(self, event: str, request: Request | None = None) -> None:
        self.met["words"] += 1
        self.met[event] += 1
        self.met[f"{event} in flight"] += request is not None and request.in_flight > 0
        self._meanwhile += 1

    def check(self) -> None:
        scheduler = self.bench.scheduler
        check_scheduler(scheduler)
        self.published = replay(self.published, scheduler.journal.drain())
        assert self.published == set(scheduler.cache.nodes())

    def drain(self) -> None:
        """Let everybody end: right, but for those whom somebody ended."""
        while self.flying:
            self.end()
        if self._limited:  # also where those that run still have the blocks to be parked
            self.bench.scheduler.clear_cache()
        for child in self.bench.specs:
            self.bench.scheduler.lifecycle.resume(ChildId(child))
        self.bench.run()
        self._count()
        self.bench.assert_empty()
        self.check()
        for child, outputs in self.bench.outputs.items():
            assert sum(output.finish is not None for output in outputs) == 1
            if child in self.ended:
                assert self.bench.finish(child) == "abort"
            elif self.bench.finish(child) == "error":
                error = outputs[-1].error
                assert error is not None
                if error.code == "slow_reader":
                    assert child in self.held
                else:
                    assert CAUSES[str(error.code)](self.bench.specs[child]), error
            else:
                self.bench.assert_right(child)
            wanted = self.bench.wanted(child)
            assert self.bench.tokens(child) == wanted[: len(self.bench.tokens(child))]

    def _count(self) -> None:
        """What the scheduler did by itself."""
        lifecycle = self.bench.scheduler.lifecycle
        self.met["preempted by the scheduler"] = lifecycle.preemptions - self.met["preempted"]
        self.met["KV of a held one released"] = lifecycle.held["released"]
        self.met["a held one ended by its cost"] = lifecycle.held["aborted"]
        if self.bench.adapters is not None:
            self.met["adapter dropped"] = len(self.bench.adapters.dropped)
        errors = [outputs[-1].error for outputs in self.bench.outputs.values()]
        codes = Counter(error.code for error in errors if error is not None)
        self.met["deadline passed"] = codes["deadline"] + codes["deadline_exceeded"]
        self.met["grammar gave up"] = codes["grammar_too_complex"]


def assert_met(met: Counter[str], events: tuple[str, ...] = EVENTS) -> None:
    """Everything has happened."""
    assert [event for event in events if not met[event]] == [], met


TO_ONE: dict[str, Callable[[Driver, Request], None]] = {
    "abort": Driver.abort,
    "hold": Driver.hold,
    "resume": Driver.resume,
    "pause": Driver.pause,
    "preempt": Driver.preempt,
}
