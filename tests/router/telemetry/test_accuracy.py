"""Predicted against actual, by replica and tenant; few names however many tenants there are."""

from __future__ import annotations

import pytest

from router.fleet.trust import Prediction
from router.telemetry.accuracy import MAX_REPLICAS, Accuracy
from router.telemetry.tally import OTHERS, TopNames
from tests.router.kit import World, prompt

P = prompt((1, 64))
HIT = Prediction(512, 100.0, 512, 500)


def seen(accuracy: Accuracy, tenant: str, skipped: int, times: int = 1, at: str = "a") -> None:
    for _ in range(times):
        accuracy.observe(at, tenant, 16, HIT, 1_024, skipped, 200.0)


def test_matched_usable_and_skipped_are_told_apart() -> None:
    accuracy = Accuracy()
    seen(accuracy, "t", 512)
    seen(accuracy, "u", 512 - 2 * 16)
    seen(accuracy, "u", 512 - 2 * 16 - 1)
    tenants = accuracy.by_tenant("a")
    assert (tenants["t"].matched_tokens, tenants["t"].usable_tokens) == (512, 500)
    assert tenants["u"].skipped_tokens == 2 * 512 - 4 * 16 - 1
    assert (tenants["t"].wrong_depth, tenants["u"].wrong_depth) == (0, 1)
    assert accuracy.total.wrong_depth_ratio == pytest.approx(1 / 3)
    answered = dict(accuracy.read(lambda of: of.answered))
    assert answered == {("a", "t"): 1, ("a", "u"): 2}
    assert dict(accuracy.read(lambda of: of.ttft_ms)) == {("a", "t"): 200.0, ("a", "u"): 400.0}


def test_R9_replicas_and_tenants_are_bounded_and_no_answer_is_lost() -> None:
    accuracy = Accuracy()
    for number in range(200):
        seen(accuracy, f"t{number}", 512)
    tenants = accuracy.by_tenant("a")
    assert len(tenants) == 17
    assert tenants[OTHERS].answered == 200 - 16
    for number in range(MAX_REPLICAS + 5):
        seen(accuracy, "t0", 512, at=f"r{number}")
    replicas = {replica for (replica, _), _ in accuracy.read(lambda of: of.answered)}
    assert len(replicas) == MAX_REPLICAS
    assert accuracy.total.answered == 200 + MAX_REPLICAS + 5


def test_names_follow_the_traffic_and_the_dropped_count_as_others() -> None:
    dropped: list[str] = []
    names = TopNames(dropped.append, limit=2, every=10)
    assert [names.label(name) for name in "abccccccc"] == ["a", "b", *[OTHERS] * 7]
    assert names.label("c") == "c"
    assert len(dropped) == 1
    assert names.label(dropped[0]) == OTHERS


def test_a_decision_and_its_outcome_tell_the_three_kinds() -> None:
    world = World(1)
    world.hold("r0", prompt((1, 8)))
    world.decide(P)
    decision = world.decide(P)
    assert decision.matched_tokens == 8 * 16
    assert decision.predicted_cached_tokens == decision.usable_tokens == 64 * 16
    world.serve(decision, cached_tokens=40 * 16)
    outcome = world.brain.decisions.get(decision.decision_id).outcome
    assert (outcome.matched_tokens, outcome.usable_tokens, outcome.cached_tokens) == (
        8 * 16,
        64 * 16,
        40 * 16,
    )


def test_what_lost_trust_takes_away_is_not_usable() -> None:
    world = World(1)
    world.hold("r0", P)
    for _ in range(12):
        world.serve(world.decide(P), cached_tokens=0)
    decision = world.decide(P)
    assert decision.matched_tokens == decision.predicted_cached_tokens == 1_024
    assert decision.usable_tokens < 150
    sums = world.brain.accuracy.by_tenant("r0")["t"]
    assert (sums.answered, sums.wrong_depth) == (12, 12)


def test_a_short_match_is_matched_but_not_usable() -> None:
    world = World(1)
    world.hold("r0", prompt((1, 1)))
    decision = world.decide(P)
    assert (decision.matched_tokens, decision.usable_tokens) == (16, 0)
