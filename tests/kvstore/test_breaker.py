"""Back-off grows, is jittered, and one trial decides whether a store is used again."""

from __future__ import annotations

from kvstore.breaker import Breaker, BreakerState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_trial_after_a_pause_that_doubles() -> None:
    clock = Clock()
    breaker = Breaker(3, first_pause_s=1.0, longest_pause_s=3.0, clock=clock, jitter=lambda: 0.5)
    for _ in range(2):
        breaker.failed()
    assert breaker.state is BreakerState.CLOSED
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        breaker.failed()
        assert breaker.state is BreakerState.OPEN
        assert not breaker.allow()
        clock.now += pause_s - 0.01
        assert not breaker.allow()
        clock.now += 0.01
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.allow()
        assert not breaker.allow(), "one trial at a time"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow()


def test_a_trial_that_never_reports_does_not_close_the_door_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(1, first_pause_s=1.0, clock=clock, jitter=lambda: 0.5)
    breaker.failed()
    clock.now = 1.0
    assert breaker.allow(trial_s=2.0)
    assert not breaker.allow(trial_s=2.0)
    clock.now = 3.0
    assert breaker.allow(trial_s=2.0)


def test_jitter_spreads_the_returns() -> None:
    def pause(jitter: float) -> float:
        clock = Clock()
        breaker = Breaker(1, first_pause_s=1.0, clock=clock, jitter=lambda: jitter)
        breaker.failed()
        while not breaker.allow():
            clock.now += 0.05
        return clock.now

    assert pause(0.0) < 0.6 < 1.4 < pause(0.999)
