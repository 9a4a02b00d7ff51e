"""Loads that fall short lose their own tier's trust, and no other's; time brings it back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router.choice.cost import fetched, runs_of
from router.choice.sheet import Demand
from router.fleet.fetches import LEAST, RECOVERY_S, FetchRun, FetchTrust
from tests.router.kit import World, load, prompt
from tests.router.locality.test_below import FAST, join

HOST, FAR = FetchRun(0, 160, 480), FetchRun(1, 480, 960)


def feed(trust: FetchTrust, cached_tokens: int, times: int = 20) -> None:
    for _ in range(times):
        trust.observe((HOST, FAR), cached_tokens, 10.0, 0.0)


@pytest.mark.parametrize(
    ("cached_tokens", "host", "far"),
    [(960, 1.0, 1.0), (480, 1.0, LEAST), (160, LEAST, 1.0), (0, 1.0, 1.0), (320, 0.5, 1.0)],
)
def test_what_fell_short_is_told_apart(cached_tokens: int, host: float, far: float) -> None:
    trust = FetchTrust()
    feed(trust, cached_tokens, 60)
    assert trust.value(0, 0.0) == pytest.approx(host, abs=0.02)
    assert trust.value(1, 0.0) == pytest.approx(far, abs=0.02)


def test_time_brings_trust_back() -> None:
    trust = FetchTrust()
    feed(trust, 160, 6)
    low = trust.value(0, 0.0)
    assert trust.short(0.0) == [0]
    assert trust.value(0, RECOVERY_S) == pytest.approx(1 - (1 - low) / 2)
    assert trust.short(2 * RECOVERY_S) == []


def test_a_promise_that_waited_for_long_says_little() -> None:
    trust = FetchTrust()
    for _ in range(20):
        trust.observe((HOST,), 160, 60_000.0, 0.0)
    assert trust.value(0, 0.0) > 0.95


def test_runs_are_those_that_the_price_counts() -> None:
    rng = random.Random(3)
    for _ in range(300):
        demand = Demand(rng.randint(1, 2_000), 16.0, 16, None)
        b, c = rng.uniform(0.01, 0.2), rng.uniform(0, 1e-4)
        overlap, depths = rng.randint(0, 60), [rng.randint(0, 130) for _ in range(3)]
        speeds = [(rng.uniform(0, 40), rng.uniform(0, 4)) for _ in range(3)]
        reach, _ = fetched(
            np.array([b]),
            np.array([c]),
            np.array([float(overlap)]),
            np.array(depths, np.float64)[:, None],
            np.array([speeds]),
            demand,
        )
        runs = runs_of(b, c, overlap, depths, speeds, range(3), 16, demand.prompt_tokens)
        brought = sum(run.end - run.first for run in runs)
        assert brought == 16 * (reach[0] - overlap)
        assert all(run.first < run.end for run in runs)


def short_loads(world: World, times: int) -> None:
    """Prompts that the host's column shows, of which nothing ever comes."""
    for number in range(times):
        decision = world.decide(prompt((number, 64)), pin="r")
        assert decision.predicted_cached_tokens == 64 * 16
        world.serve(decision, cached_tokens=0)
        world.fleet.on_load("r", 1, load(fetch=(FAST, FAST)))


def test_a_host_that_gives_nothing_costs_more_and_the_device_keeps_its_trust() -> None:
    world = World()
    chains = tuple(prompt((number, 64)) for number in range(40))
    join(world, "r", host=chains[:30], remote=chains[30:])
    short_loads(world, 6)
    world.clock.pass_s(1.0)
    world.fleet.check()
    member = world.fleet.member("r")
    assert member.trust.value == 1.0
    assert world.fleet.alarms.active("loads_fall_short", "r")
    dear, fair = (world.brain.explain(world.query(chains[n])).candidates[0] for n in (29, 39))
    assert dear.transfer_ms > 3 * fair.transfer_ms > 0
    world.clock.pass_s(4 * RECOVERY_S)
    world.fleet.on_load("r", 1, load(fetch=(FAST, FAST)))
    world.fleet.check()
    assert not world.fleet.alarms.active("loads_fall_short", "r")


def test_a_host_that_gives_nothing_is_blamed_for_prompts_that_were_just_sent_there_too() -> None:
    """What is on its way to a device counts as there, and may have been evicted again: with it was
    blamed the digest, which had shown none of it."""
    world = World()
    chains = tuple(prompt((number, 64)) for number in range(4))
    join(world, "r", host=chains)
    for _ in range(3):
        for keys in chains:
            decision = world.decide(keys)
            assert (decision.predicted_cached_tokens, decision.matched_tokens) == (64 * 16, 0)
            world.serve(decision, cached_tokens=0)
            world.fleet.on_load("r", 1, load(fetch=(FAST, FAST)))
    world.clock.pass_s(1.0)
    world.fleet.check()
    assert world.fleet.member("r").trust.value == 1.0
    assert world.fleet.alarms.active("loads_fall_short", "r")
    assert not world.fleet.alarms.active("false_hits", "r")
