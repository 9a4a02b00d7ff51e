"""Who is named in the cluster file and away has an alarm for as long as that is so."""

from __future__ import annotations

from router.fleet.awaited import AWAY_AFTER_S, Awaited
from tests.router.kit import World, hello


def test_who_is_named_and_away_has_an_alarm_until_it_is_back() -> None:
    world = World()
    awaited = Awaited(["a", "b"], world.fleet, world.clock)
    world.fleet.on_hello("a", 1, hello())

    def after_s(seconds: float) -> set[tuple[str, str]]:
        world.clock.pass_s(seconds)
        awaited.check()
        return {(alarm.name, alarm.replica) for alarm in world.fleet.alarms}

    assert not after_s(AWAY_AFTER_S / 2)
    assert after_s(AWAY_AFTER_S) == {("replica_away", "b")}
    assert after_s(1_000.0) == {("replica_away", "b")}
    world.fleet.on_hello("b", 1, hello())
    assert not after_s(0.0)
    world.fleet.on_gone("a", 1, "dead")
    assert not after_s(AWAY_AFTER_S / 2), "it may only be starting again"
    assert after_s(AWAY_AFTER_S) == {("replica_away", "a")}


def test_who_comes_and_goes_without_being_named_is_nobodys_worry() -> None:
    world = World()
    awaited = Awaited([], world.fleet, world.clock)
    world.fleet.on_hello("guest", 1, hello())
    awaited.check()
    world.fleet.on_gone("guest", 1, "bye")
    world.clock.pass_s(10 * AWAY_AFTER_S)
    awaited.check()
    assert not list(world.fleet.alarms)
