"""Random words to pool, cache and scheduler; every promise is checked after every one of them."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import ServiceOrder
from replica.sched.plan import ChildId
from replica.sched.policies import POLICIES
from replica.sched.policies.deadline import Deadline
from replica.sched.request import Request
from tests.fakes.adapter_loader import FakeAdapters
from tests.props.driver import (
    ADAPTER_EVENTS,
    ADAPTERS,
    MOST_LIVE,
    TO_ONE,
    WISHES,
    Driver,
    Wish,
    assert_met,
)
from tests.replica.sched.rig import Bench, real_key, short_key

CHECKED_SHARE = 0.1

LONG_STEPS = int(os.environ.get("WARMROUTE_MACHINE_STEPS", "120000"))
"""Of the long runs, each."""

EXAMPLE_STEPS = 80
SEED_STEPS = 10_000

SEEDS = (6, 7, 8, 13, 16, 25, 44, 45, 47)
"""A few that together meet everything."""

ADAPTER_SEEDS = (1, 2, 19)
"""In the last one a request is held that has its adapter, but no row yet."""

ASKED = st.tuples(
    st.integers(0, 2),
    st.integers(1, 12),
    st.integers(1, 20),
    st.booleans(),
    st.builds(Wish, **{name: st.sampled_from(values) for name, values in WISHES.items()}),
)
"""What Driver.add is told."""

THEN = st.integers(0, 3)
"""Whole steps behind a word: by themselves they would be too rare to bring anybody far."""


class EngineMachine(RuleBasedStateMachine):
    """The rules of hypothesis. `met`: of all examples."""

    met: ClassVar[Counter[str]] = Counter()

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
        first=st.lists(ASKED, min_size=2, max_size=6),
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
        first: list[tuple[int, int, int, bool, Wish]],
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
        # Here and not only by the rule: hypothesis leaves rules out of whole examples.
        for each in first:
            self.driver.add(*each)

    @rule(asked=st.lists(ASKED, min_size=1, max_size=3), then=THEN)
    def add(self, asked: list[tuple[int, int, int, bool, Wish]], then: int) -> None:
        for each in asked:
            self.driver.add(*each)
        self.driver.steps(then)

    @rule()
    def begin(self) -> None:
        self.driver.begin()

    @rule()
    def commit(self) -> None:
        self.driver.end()

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        self.driver.steps(count)

    @precondition(lambda self: self.driver.flying)
    @rule(fails=st.booleans(), spoils=st.booleans())
    def execute(self, fails: bool, spoils: bool) -> None:
        if fails:
            self.driver.begin()  # one behind it, to be called off
        self.driver.execute(fails, spoils)

    @rule(blocks=st.integers(0, 5))
    def land(self, blocks: int) -> None:
        self.driver.land(blocks)

    @precondition(lambda self: self.driver.live)
    @rule(
        word=st.sampled_from(sorted(TO_ONE)),
        place=st.integers(0, 9),
        midway=st.booleans(),
        then=THEN,
    )
    def to_one(self, word: str, place: int, midway: bool, then: int) -> None:
        if midway:
            self.driver.begin()
        if self.driver.live:
            TO_ONE[word](self.driver, self.driver.pick(place))
        self.driver.steps(then)

    @precondition(lambda self: self.driver.live)
    @rule(place=st.integers(0, 9), steps=st.integers(4, 12))
    def dawdle(self, place: int, steps: int) -> None:
        self.driver.dawdle(self.driver.pick(place), steps)

    @rule(child=st.integers(0, 3))
    def to_nobody(self, child: int) -> None:
        """One that has ended, or never was."""
        if self.driver.bench.scheduler.table.get(ChildId(child)) is None:
            for word in ("abort", "hold", "resume"):
                getattr(self.driver.bench.scheduler.lifecycle, word)(ChildId(child))

    @rule(seconds=st.sampled_from([0.06, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @rule(blocks=st.integers(1, 9))
    def evict(self, blocks: int) -> None:
        self.driver.evict(blocks)

    @rule(limit_blocks=st.sampled_from([None, 4, 8]))
    def clear(self, limit_blocks: int | None) -> None:
        self.driver.clear(limit_blocks)

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.met.update(self.driver.met)


def run_machine(examples: int, steps: int) -> Counter[str]:
    """What happened in all examples; the same each time."""
    EngineMachine.met.clear()
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
    return EngineMachine.met


def random_steps(seed: int, steps: int, adapters: int = 0) -> Counter[str]:
    """The same words without shrinking, for long runs. Plans and commits check themselves; what
    lies between is looked at now and then. `adapters`: so many are in memory at once."""
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
        # Only whole keys tell one adapter's blocks from another's.
        next_key=rng.choice([real_key, real_key if adapters else short_key]),
        eos=5,
        tiered=rng.random() < 0.5,
        policy=POLICIES[rng.choice(list(POLICIES))](),
        shadow=Deadline(),
        adapters=FakeAdapters(*filter(None, ADAPTERS)) if adapters else None,
        max_adapters=max(1, adapters),
        max_adapters_per_batch=max(1, adapters),
    )
    if rng.random() < 0.5:
        # The device is as slow as the clock says, so that promises can be broken.
        bench.runner.device_ms = lambda plan: 900.0 + 5.0 * plan.tokens
    driver = Driver(bench)
    slow_share = rng.choice([0.0, 0.04])
    for _ in range(steps):
        word = rng.random()
        request = driver.pick(rng.randrange(12)) if driver.live else None
        if word < 0.15 and len(bench.scheduler.table) < MOST_LIVE:
            wish = Wish(**{name: rng.choice(values) for name, values in WISHES.items()})
            wanted = max(1, rng.randint(-2, 12))
            driver.add(rng.randrange(4), rng.randint(1, 14), wanted, word < 0.01, wish)
        elif word < 0.15 + slow_share and request is not None:
            driver.dawdle(request, 20)
        elif word < 0.35 and request is not None:
            _to_one(driver, request, word)
        elif word < 0.39:
            driver.land(rng.randint(0, 5))
        elif word < 0.392:
            driver.evict(rng.randint(1, 9))
        elif word < 0.4:
            driver.wait(rng.choice((0.06, 1.0, 5.0)))
        elif word < 0.405:
            driver.clear(rng.choice([None, None, 7]))
        elif not driver.flying or (word < 0.7 and len(driver.flying) < 2):
            driver.begin()
        elif word < 0.75:
            driver.execute(spoils=rng.random() < 0.1)
        else:
            driver.end(fails=rng.random() < 0.03)
        if rng.random() < CHECKED_SHARE:
            driver.check()
    driver.drain()
    return driver.met


def _to_one(driver: Driver, request: Request, word: float) -> None:
    if word < 0.2:
        driver.abort(request)
    elif word < 0.26:
        driver.hold(request)
    elif word < 0.335:
        driver.resume(request)
    else:
        driver.preempt(request)


def test_c9_random_words_keep_every_promise() -> None:
    run_machine(examples=45, steps=40)


def test_c9_random_steps_meet_everything() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met += random_steps(seed, 400)
    assert_met(met)


def test_blocks_that_were_to_be_parked_are_there_again_at_the_end() -> None:
    driver = Driver(Bench(6, 3, max_step_tokens=30))
    driver.add(0, 14, 3, skip=False)
    driver.begin()
    driver.clear(4)
    assert driver.bench.scheduler.cache.parked == []
    driver.drain()


def test_c9_adapters_come_and_go_meanwhile() -> None:
    met: Counter[str] = Counter()
    for seed in ADAPTER_SEEDS:
        met += random_steps(seed, 400, adapters=1 + seed % 2)
    assert_met(met, ADAPTER_EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [1, 2])
def test_c9_adapters_at_length(adapters: int) -> None:
    assert_met(random_steps(200 + adapters, SEED_STEPS, adapters), ADAPTER_EVENTS)


@pytest.mark.slow
def test_c9_random_words_at_length() -> None:
    met = run_machine(examples=max(1, LONG_STEPS // EXAMPLE_STEPS), steps=EXAMPLE_STEPS)
    assert_met(met)
    assert met["words"] >= LONG_STEPS * 5 // 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + max(1, LONG_STEPS // SEED_STEPS)))
def test_c9_a_hundred_thousand_steps(seed: int) -> None:
    random_steps(seed, SEED_STEPS)
