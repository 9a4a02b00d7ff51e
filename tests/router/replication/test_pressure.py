"""Requests that are forced off the replica that is warm for them: noticed, named and counted."""

from __future__ import annotations

import pytest

from router.replication import pressure
from router.replication.pressure import OTHERS, Pressure
from tests.router.gateway.kit import job
from tests.router.kit import World, load, prompt
from tests.router.replication.test_heat import decided

P = prompt((1, 64))


def busy(world: World, *replicas: str) -> None:
    for replica in replicas:
        world.fleet.on_load(replica, 1, load(waiting=2, queued_prefill_tokens=50_000))


def test_a_choice_names_the_warm_replica_that_lost_by_its_queue() -> None:
    world = World(3)
    world.hold("r0", P)
    assert world.decide(P).forced_off == ""
    busy(world, "r0")
    decision = world.decide(P)
    assert decision.replica != "r0"
    assert decision.forced_off == "r0"
    assert decision.shared_blocks == 64


def test_of_several_warm_ones_it_is_the_one_that_came_closest() -> None:
    world = World(3)
    world.hold("r0", P)
    world.hold("r1", P)
    busy(world, "r0", "r1")
    world.fleet.on_load("r0", 1, load(waiting=9, queued_prefill_tokens=90_000))
    assert world.decide(P).forced_off == "r1"


def test_nobody_is_forced_off_by_a_rule_that_is_blind_or_by_who_may_not_take_it() -> None:
    blind = World(2, policy="round_robin")
    blind.hold("r0", P)
    assert {blind.decide(P).forced_off for _ in range(4)} == {""}
    world = World(2)
    world.hold("r0", P)
    world.fleet.on_load("r0", 1, load(draining=True))
    decision = world.decide(P)
    assert (decision.replica, decision.forced_off, decision.shared_blocks) == ("r1", "", 0)


def test_the_signal_fades_and_its_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "MAX_NAMES", 2)
    world = World(2)
    busy(world, "r1")
    watch = Pressure(world.fleet, world.clock)
    for number in range(8):
        watch.note(job(), decided(9, held=0, forced_off=f"r{number % 4}"))
        watch.note(job(), decided(9))
        watch.note(job(pin="r0"), decided(9))
    assert dict(watch.totals()) == {("r0",): 2, ("r1",): 2, (OTHERS,): 4}
    now = watch.signal()
    assert (now.replicas, now.waiting, now.queued_prefill_tokens) == (2, 2, 50_000)
    assert now.decisions_per_s == pytest.approx(2 * now.forced_off_per_s)
    world.clock.pass_s(pressure.HALF_LIFE_S)
    assert watch.signal().forced_off_per_s == pytest.approx(now.forced_off_per_s / 2)
