"""Simulated runs: nothing is lost, nothing depends on the short cuts, everything repeats."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from replica.sched.invariants import check_scheduler
from router.policies import POLICIES
from tools.sim.call import Call, Trace
from tools.sim.faults import Fault
from tools.sim.profiles import DEVICES
from tools.sim.replica import SimReplica
from tools.sim.run import Run
from tools.sim.settings import CLAIRVOYANT, Settings
from tools.sim.summary import summary
from tools.sim.tiers import TierSpec
from tools.sim.wire import BusFaults
from tools.sim.world import World

BLOCK = 64
DEVICE = dataclasses.replace(DEVICES["a10g-7b"], max_running=8)


def trace(calls: int = 60, groups: int = 6, seed: int = 3) -> Trace:
    """Groups that share a head; own tails; answers of some tokens."""
    rng = random.Random(seed)
    made, at_s = [], 0.0
    for number in range(calls):
        group = rng.randrange(groups)
        head = np.arange(group * 1_000, group * 1_000 + 12)
        tail = np.arange(1_000_000 + number * 100, 1_000_000 + number * 100 + rng.randint(1, 6))
        blocks = np.concatenate((head, tail))
        tokens = len(blocks) * BLOCK - rng.randrange(BLOCK)
        made.append(Call(at_s, f"t{group % 2}", blocks, tokens, rng.randint(1, 90)))
        at_s += rng.expovariate(1.0)
    return Trace("test", BLOCK, tuple(made))


def settings(**changes: object) -> Settings:
    base = Settings(policy="warmroute", replicas=3, load=0.9, device=DEVICE, kv_tokens=64 * BLOCK)
    return dataclasses.replace(base, **changes)


def times(run: Run) -> list[tuple[object, ...]]:
    return [
        (r.replica, r.cached_tokens, round(r.ttft_s, 9), round(r.e2e_s, 9)) for r in run.records
    ]


@pytest.mark.parametrize("policy", [*sorted(POLICIES), CLAIRVOYANT])
def test_every_request_ends_once(policy: str) -> None:
    of = trace()
    run = World(of, settings(policy=policy)).run()
    assert len(run.records) == len(of.calls)
    assert all(r.e2e_s >= r.ttft_s > 0 and not r.failed for r in run.records)
    assert all(0 <= r.cached_tokens < r.prompt_tokens for r in run.records)
    assert summary(run)["requests"] == len(of.calls)


def test_a_prompt_that_no_replica_has_room_for_is_refused_not_asked_for_ever() -> None:
    of = trace(20)
    calls = list(of.calls)
    huge = np.arange(5_000_000, 5_000_000 + 100)
    calls[7] = dataclasses.replace(calls[7], blocks=huge, prompt_tokens=100 * BLOCK)
    of = dataclasses.replace(of, calls=tuple(calls))
    run = World(of, settings()).run()
    assert [number for number, r in enumerate(run.records) if r.failed] == [7]
    assert summary(run)["failed"] == 1
    assert World(of, settings()).ttft_within_s(0.9, 1e6) is not None
    assert World(of, settings()).ttft_within_s(1.0, 1e6) is None


def test_the_same_settings_give_the_same_run_to_the_bit() -> None:
    first, second = (World(trace(), settings()).run() for _ in range(2))
    assert first.records == second.records
    assert first.busy_s == second.busy_s


@pytest.mark.parametrize("policy", ["round_robin", "random"])
@pytest.mark.parametrize("load", [0.3, 1.5])
def test_steps_taken_in_one_go_change_nothing(policy: str, load: float) -> None:
    quick, slow = (
        World(
            trace(), settings(policy=policy, load=load, fast_forward=fast, itl_target_ms=0.0)
        ).run()
        for fast in (True, False)
    )
    assert times(quick) == times(slow)


def test_one_replica_alone_serves_in_order() -> None:
    """Without sharing and with one token each, first tokens come as from a single server."""
    calls = tuple(
        Call(3.0 * n, "t", np.arange(n * 50, n * 50 + 4), 4 * BLOCK, 1) for n in range(10)
    )
    run = World(Trace("lonely", BLOCK, calls), settings(replicas=1, load=0.5)).run()
    alone_s = 1e-3 * DEVICE.prefill.predict_ms(0, 4 * BLOCK)
    assert all(r.ttft_s == pytest.approx(alone_s) for r in run.records)
    assert all(r.cached_tokens == 0 for r in run.records)


def test_a_warm_prompt_is_quicker() -> None:
    same = tuple(Call(5.0 * n, "t", np.arange(20), 20 * BLOCK, 1) for n in range(4))
    run = World(Trace("same", BLOCK, same), settings(load=0.2)).run()
    cold, *warm = run.records
    assert cold.cached_tokens == 0
    assert {r.cached_tokens for r in warm} == {19 * BLOCK}
    assert {r.replica for r in warm} == {cold.replica}
    assert all(r.ttft_s < cold.ttft_s for r in warm)


@pytest.mark.parametrize(
    "changes",
    [
        {"bus": BusFaults(lag_s=0.2, loss=0.3)},
        {"bus": BusFaults(lag_s=0.05, jitter_s=0.5)},
        {"muted": ("r1",)},
        {"speeds": (("r0", 0.25),)},
        {"faults": (Fault(5.0, "die", "r0"),)},
        {"faults": (Fault(5.0, "restart", "r0"), Fault(9.0, "restart", "r1"))},
        {"faults": (Fault(5.0, "router"),)},
        {"faults": (Fault(2.0, "join", "r3"), Fault(5.0, "die", "r3"))},
    ],
    ids=["loss", "disorder", "muted", "slow", "death", "restarts", "router", "join"],
)
def test_whatever_breaks_every_request_is_answered(changes: dict[str, object]) -> None:
    of = trace()
    run = World(of, settings(**changes)).run()
    assert len(run.records) == len(of.calls)
    assert all(r.e2e_s > 0 and not r.failed for r in run.records)


def test_everything_reserved_is_given_back() -> None:
    world = World(trace(), settings(faults=(Fault(5.0, "restart", "r0"), Fault(9.0, "router"))))
    world.run()
    assert len(world.brain.ledger) == 0
    for replica in world.replicas():
        assert len(list(replica.scheduler.table)) == 0
        check_scheduler(replica.scheduler)


@pytest.mark.parametrize("load", [0.6, 2.0])
def test_the_schedulers_promises_hold_after_every_step(load: float) -> None:
    world, checked = World(trace(), settings(load=load)), 0

    def watch(replica: SimReplica) -> None:
        publish = replica.on_change

        def check(changed: SimReplica) -> None:
            nonlocal checked
            checked += 1
            check_scheduler(changed.scheduler)
            publish(changed)

        replica.on_change = check

    for replica in world.replicas():
        watch(replica)
    world.run()
    assert checked > 2 * len(trace().calls)


def test_who_joins_is_given_work() -> None:
    run = World(trace(), settings(faults=(Fault(2.0, "join", "r3"),))).run()
    assert summary(run)["replicas"]["r3"]["requests"] > 0


def test_losses_are_repaired() -> None:
    assert World(trace(), settings(bus=BusFaults(loss=0.3))).run().repairs > 0


def test_a_share_of_first_tokens_is_known_before_the_last_answer() -> None:
    of = settings(load=1.1, faults=(Fault(5.0, "restart", "r0"),))
    times_s = [record.ttft_s for record in World(trace(), of).run().records]
    p90_s = float(np.quantile(times_s, 0.9))
    assert World(trace(), of).ttft_within_s(0.9, 1.05 * p90_s) == p90_s
    assert World(trace(), of).ttft_within_s(0.9, p90_s) == p90_s
    assert World(trace(), of).ttft_within_s(0.9, math.nextafter(p90_s, 0.0)) is None


HOST = TierSpec(10_000 * BLOCK, gbytes_per_s=25.0, latency_ms=0.2, shared=False)
STORE = TierSpec(10_000 * BLOCK, gbytes_per_s=3.0, latency_ms=2.0, shared=True)


@pytest.mark.parametrize("tiers", [(STORE,), (HOST, STORE)], ids=["store", "both"])
def test_what_a_device_cannot_keep_comes_back_from_the_tiers(tiers: tuple[TierSpec, ...]) -> None:
    small = {"kv_tokens": 30 * BLOCK, "faults": (Fault(5.0, "restart", "r0"),)}
    of = trace(groups=12)
    plain = summary(World(of, settings(**small)).run())
    world = World(of, settings(**small, tiers=tiers))
    with_tiers = summary(world.run())
    assert plain["moved_gbytes"] == 0
    assert with_tiers["moved_gbytes"] > with_tiers["fetched_gbytes"] > 0
    assert with_tiers["cached_token_ratio"] > 1.1 * plain["cached_token_ratio"]
    for replica in world.replicas():
        check_scheduler(replica.scheduler)


def test_a_slow_tier_is_left_alone() -> None:
    slow = dataclasses.replace(HOST, gbytes_per_s=0.001)
    figures = summary(World(trace(), settings(kv_tokens=30 * BLOCK, tiers=(slow,))).run())
    assert figures["fetched_gbytes"] == 0
