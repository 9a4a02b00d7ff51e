"""The breaker: consecutive faults open it, one trial closes it."""

from __future__ import annotations

from router.fleet.breaker import (
    FADE_S,
    FAILURES_TO_OPEN,
    OPEN_MAX_S,
    OPEN_S,
    TRIAL_S,
    Breaker,
    BreakerState,
)


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failure(0.0)
    return breaker


def test_R13_one_miss_does_not_open_it() -> None:
    breaker = Breaker()
    for turn in range(20):
        breaker.failure(float(turn))
        assert breaker.admits(turn)
        breaker.success()


def test_consecutive_faults_open_it_for_a_while() -> None:
    breaker = opened()
    assert not breaker.admits(OPEN_S - 0.1)
    assert breaker.wait_s(0.0) == OPEN_S
    assert breaker.state(OPEN_S) is BreakerState.HALF_OPEN


def test_half_open_lets_one_trial_through() -> None:
    breaker = opened()
    assert breaker.admits(OPEN_S)
    breaker.begin(OPEN_S)
    assert not breaker.admits(OPEN_S)
    breaker.success()
    assert breaker.state(OPEN_S) is BreakerState.CLOSED


def test_a_trial_that_is_never_told_ends_by_itself() -> None:
    breaker = opened()
    breaker.begin(OPEN_S)
    assert breaker.admits(OPEN_S + TRIAL_S)


def test_failed_trials_wait_longer_up_to_a_bound() -> None:
    breaker, now_s = opened(), OPEN_S
    for _ in range(12):
        now_s += breaker.wait_s(now_s)
        breaker.begin(now_s)
        breaker.failure(now_s)
    assert breaker.wait_s(now_s) == OPEN_MAX_S


def test_R15_a_first_token_ends_a_trial_but_does_not_forgive() -> None:
    breaker = opened()
    breaker.begin(OPEN_S)
    breaker.alive(OPEN_S)
    assert breaker.admits(OPEN_S)
    breaker.failure(OPEN_S)
    assert not breaker.admits(OPEN_S)


def test_R13_a_miss_is_forgotten_where_nobody_asks_any_more() -> None:
    breaker = Breaker()
    breaker.failure(0.0)
    assert not breaker.fade(FADE_S - 0.1)
    assert breaker.failures == 1
    assert breaker.fade(FADE_S)
    assert breaker.failures == 0
    assert not breaker.fade(2 * FADE_S)


def test_R15_one_that_nobody_tries_is_forgiven_step_by_step() -> None:
    breaker = opened()
    assert not breaker.fade(OPEN_S + FADE_S - 0.1)
    assert breaker.fade(OPEN_S + FADE_S)
    assert (breaker.closed, breaker.failures) == (True, FAILURES_TO_OPEN - 1)
    assert not breaker.fade(OPEN_S + 2 * FADE_S - 0.1)
    assert breaker.fade(OPEN_S + 2 * FADE_S)
    assert breaker.failures == 0


def test_R15_one_that_fails_again_after_that_is_left_alone_for_longer() -> None:
    breaker, now_s = opened(), OPEN_S + FADE_S
    for turn in range(1, 12):
        assert breaker.fade(now_s)
        breaker.failure(now_s)
        assert breaker.wait_s(now_s) == min(OPEN_MAX_S, OPEN_S * 2**turn)
        now_s += breaker.wait_s(now_s) + FADE_S


def test_a_trial_under_way_is_waited_for() -> None:
    breaker = opened()
    breaker.begin(OPEN_S)
    assert not breaker.fade(OPEN_S + TRIAL_S)
    breaker.undecided()
    assert breaker.fade(OPEN_S + TRIAL_S)
