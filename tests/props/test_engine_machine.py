"""Random words to pool, cache and scheduler; every promise is checked after every one of them.

The machine may be in the middle of a step at any time, with the next one planned already: words
that come then meet a late commit.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import WARM_SHARE, ServiceOrder
from replica.engine.messages import EngineRequest
from replica.sched.invariants import check_scheduler
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult
from replica.sched.policies import POLICIES
from replica.sched.policies.deadline import Deadline
from tests.fakes.grammar import FakeGrammar
from tests.fakes.runner import NON_FINITE, FakeRunnerError
from tests.replica.cache.test_journal import replay
from tests.replica.sched.rig import Bench, real_key, sampling, short_key, tokens_of

CHECKED_SHARE = 0.1

LONG_STEPS = int(os.environ.get("WARMROUTE_MACHINE_STEPS", "120000"))
"""Of the long runs, each."""

EXAMPLE_STEPS = 80
SEED_STEPS = 10_000


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
}
"""Which requests may end with which error, but for those whose reader was slow."""


class Driver:
    """What both machines do, with the bookkeeping of who was ended from outside."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.flying: deque[ExecutionPlan] = deque()
        self.result: ExecutionResult | None = None
        self.spoilt: set[int] = set()
        self.ended: set[int] = set()
        self.published: set[bytes] = set()
        self.held: set[int] = set()

    def add(self, family: int, length: int, wanted: int, skip: bool, wish: Wish = PLAIN) -> ChildId:
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
        return self.bench.add(prompt, params, **fields)

    def begin(self) -> None:
        """A plan, or the one behind it."""
        scheduler = self.bench.scheduler
        if not self.flying:
            plan = self.bench.plan()
        elif len(self.flying) == 1 and self.result is None:
            plan = scheduler.plan_ahead(self.bench.now_s)
            self.bench.collect()
        else:
            return
        if plan is not None:
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
        try:
            self.result = self.bench.runner.execute(plan)
        except FakeRunnerError:
            assert fails
            self.bench.scheduler.fail()
            self.bench.collect()
            self.flying.clear()
        faults.row_errors.clear()

    def end(self, fails: bool = False) -> None:
        """The oldest plan is committed, or fails."""
        self.execute(fails)
        if self.result is not None:
            self.bench.scheduler.commit(self.result)
            self.bench.collect()
            self.flying.popleft()
            self.result = None

    def abort(self, child: ChildId) -> None:
        if self.bench.finish(child) is None:
            self.ended.add(child)
        self.bench.scheduler.lifecycle.abort(child)
        self.bench.collect()

    def hold(self, child: ChildId) -> None:
        self.bench.scheduler.lifecycle.hold(child)
        self.held.add(child)

    def wait(self, seconds: float) -> None:
        """Time goes by, and nothing else."""
        self.bench.now_s += seconds
        self.bench.scheduler.expire(self.bench.now_s)
        self.bench.collect()

    def preempt(self, child: ChildId) -> None:
        request = self.bench.scheduler.table.get(child)
        if request is not None and request.state.name == "RUNNING":
            self.bench.scheduler.lifecycle.preempt(request)

    def evict(self, blocks: int) -> None:
        cache = self.bench.scheduler.cache
        cache.release(cache.allocate(min(blocks, cache.available)))

    def land(self, blocks: int) -> None:
        tiers = self.bench.tiers
        if tiers is not None and tiers.open:
            tiers.finish(next(iter(tiers.open)), blocks)
        elif tiers is not None and tiers.writing:
            tiers.wrote(next(iter(tiers.writing)), blocks)
            self.bench.collect()

    def check(self) -> None:
        scheduler = self.bench.scheduler
        check_scheduler(scheduler)
        self.published = replay(self.published, scheduler.journal.drain())
        assert self.published == set(scheduler.cache.nodes())

    def drain(self) -> None:
        """Let everybody end: right, but for those whom somebody ended."""
        while self.flying:
            self.end()
        if self.bench.scheduler.cache.parked:
            self.bench.scheduler.clear_cache()
        for child in self.bench.specs:
            self.bench.scheduler.lifecycle.resume(ChildId(child))
        self.bench.run()
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


class EngineMachine(RuleBasedStateMachine):
    """The rules of hypothesis."""

    children: Bundle[ChildId] = Bundle("children")

    @initialize(
        blocks=st.sampled_from([6, 9, 16, 40]),
        step_tokens=st.sampled_from([2, 7, 30]),
        seats=st.integers(1, 5),
        horizon=st.sampled_from([1, 64]),
        itl_target_ms=st.sampled_from([0.0, 3.0]),
        key=st.sampled_from([real_key, short_key]),
        tiered=st.booleans(),
        max_loads=st.integers(1, 3),
        order=st.sampled_from(list(POLICIES)),
    )
    def start(
        self,
        blocks: int,
        step_tokens: int,
        seats: int,
        horizon: int,
        itl_target_ms: float,
        key: object,
        tiered: bool,
        max_loads: int,
        order: ServiceOrder,
    ) -> None:
        self.driver = Driver(
            Bench(
                blocks,
                3,
                max_step_tokens=step_tokens,
                max_running=seats,
                horizon_tokens=horizon,
                itl_target_ms=itl_target_ms,
                max_prefills=3,
                max_loads=max_loads,
                next_key=key,
                eos=5,
                tiered=tiered,
                policy=POLICIES[order](),
                shadow=Deadline(),
            )
        )

    @rule(
        target=children,
        family=st.integers(0, 2),
        length=st.integers(1, 12),
        wanted=st.integers(1, 9),
        skip=st.booleans(),
        wish=st.builds(Wish, **{name: st.sampled_from(values) for name, values in WISHES.items()}),
    )
    def add(self, family: int, length: int, wanted: int, skip: bool, wish: Wish) -> ChildId:
        return self.driver.add(family, length, wanted, skip, wish)

    @rule()
    def begin(self) -> None:
        self.driver.begin()

    @rule()
    def commit(self) -> None:
        self.driver.end()

    @precondition(lambda self: self.driver.flying)
    @rule(fails=st.booleans(), spoils=st.booleans())
    def execute(self, fails: bool, spoils: bool) -> None:
        self.driver.execute(fails, spoils)

    @rule(blocks=st.integers(0, 5))
    def land(self, blocks: int) -> None:
        self.driver.land(blocks)

    @rule(child=children)
    def abort(self, child: ChildId) -> None:
        self.driver.abort(child)

    @rule(child=children)
    def hold(self, child: ChildId) -> None:
        self.driver.hold(child)

    @rule(seconds=st.sampled_from([0.06, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @rule(child=children)
    def resume(self, child: ChildId) -> None:
        self.driver.bench.scheduler.lifecycle.resume(child)

    @rule(child=children)
    def preempt(self, child: ChildId) -> None:
        self.driver.preempt(child)

    @rule(blocks=st.integers(1, 9))
    def evict(self, blocks: int) -> None:
        self.driver.evict(blocks)

    @rule(limit_blocks=st.sampled_from([None, 4, 8]))
    def clear(self, limit_blocks: int | None) -> None:
        self.driver.bench.scheduler.clear_cache(limit_blocks)

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def random_steps(seed: int, steps: int) -> None:
    """The same words without shrinking, for long runs. Plans and commits check themselves; what
    lies between is looked at now and then."""
    rng = random.Random(seed)
    bench = Bench(
        rng.choice([8, 12, 24]),
        3,
        max_step_tokens=rng.choice([3, 8, 30]),
        max_running=rng.randint(1, 6),
        horizon_tokens=rng.choice([1, 8, 64]),
        itl_target_ms=rng.choice([0.0, 3.0]),
        max_prefills=rng.choice([1, 3]),
        max_loads=rng.choice([1, 2, 8]),
        retract_every_steps=rng.choice([0, 0, 7]),
        next_key=rng.choice([real_key, short_key]),
        eos=5,
        tiered=rng.random() < 0.5,
        policy=POLICIES[rng.choice(list(POLICIES))](),
        shadow=Deadline(),
    )
    if rng.random() < 0.5:
        # The device is as slow as the clock says, so that promises can be broken.
        bench.runner.device_ms = lambda plan: 900.0 + 5.0 * plan.tokens
    driver = Driver(bench)
    children: list[ChildId] = []
    for _ in range(steps):
        word = rng.random()
        if word < 0.15 and len(bench.scheduler.table) < 12:
            wish = Wish(**{name: rng.choice(values) for name, values in WISHES.items()})
            child = driver.add(
                rng.randrange(4), rng.randint(1, 14), rng.randint(1, 12), word < 0.01, wish
            )
            children.append(child)
        elif word < 0.22 and children:
            driver.abort(rng.choice(children[-12:]))
        elif word < 0.27 and children:
            driver.hold(rng.choice(children[-12:]))
        elif word < 0.335 and children:
            bench.scheduler.lifecycle.resume(rng.choice(children[-30:]))
        elif word < 0.36 and children:
            driver.preempt(rng.choice(children[-12:]))
        elif word < 0.39:
            driver.land(rng.randint(0, 5))
        elif word < 0.392:
            driver.evict(rng.randint(1, 9))
        elif word < 0.4:
            driver.wait(rng.choice((0.06, 1.0, 5.0)))
        elif word < 0.405:
            bench.scheduler.clear_cache(rng.choice([None, None, 7]))
        elif not driver.flying or (word < 0.7 and len(driver.flying) < 2):
            driver.begin()
        elif word < 0.75:
            driver.execute(spoils=rng.random() < 0.02)
        else:
            driver.end(fails=rng.random() < 0.01)
        if rng.random() < CHECKED_SHARE:
            driver.check()
    driver.drain()


def test_c9_random_words_keep_every_promise() -> None:
    run_machine(examples=60, steps=40)


@pytest.mark.parametrize("seed", range(6))
def test_c9_random_steps(seed: int) -> None:
    random_steps(seed, 600)


@pytest.mark.slow
def test_c9_random_words_at_length() -> None:
    run_machine(examples=max(1, LONG_STEPS // EXAMPLE_STEPS), steps=EXAMPLE_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + max(1, LONG_STEPS // SEED_STEPS)))
def test_c9_a_hundred_thousand_steps(seed: int) -> None:
    random_steps(seed, SEED_STEPS)
