"""A policy in the shadow: what it counts, and that it changes nothing."""

from __future__ import annotations

import logging

import pytest

from router.choice.shadow import DIFFERENCES_KEPT
from router.policies import POLICIES
from tests.router.kit import BLOCK_TOKENS, World, prompt

P = prompt((1, 20))


def warm_world() -> World:
    """r0 holds P."""
    world = World()
    world.join("r0", held=(P,))
    world.join("r1")
    world.join("r2")
    return world


def test_the_report_tells_agreement_and_differences() -> None:
    world = warm_world()
    world.brain.shadow.set_policy("round_robin")
    for _ in range(6):
        world.serve(world.decide(P), cached_tokens=20 * BLOCK_TOKENS)
    report = world.brain.shadow.report()
    assert (report["shadow"], report["failed"]) == ("round_robin", 0)
    of = report["by_policy"]["warmroute"]
    assert (of["compared"], of["agreed"], of["agreement"]) == (6, 2, pytest.approx(1 / 3))
    cached = of["predicted_cached_tokens"]
    assert cached == {"live": 6 * 20 * BLOCK_TOKENS, "shadow": 2 * 20 * BLOCK_TOKENS}
    assert of["mean_difference"]["cached_tokens"] == pytest.approx(-4 / 6 * 20 * BLOCK_TOKENS)
    assert of["mean_difference"]["ttft_ms"] > 0
    assert len(report["differences"]) == 4
    newest = report["differences"][0]
    assert world.brain.decisions.get(newest.decision_id).decision.replica == newest.replica == "r0"
    assert newest.shadow_replica in ("r1", "r2")
    assert newest.cached_tokens == -20 * BLOCK_TOKENS


@pytest.mark.parametrize("shadow", sorted(POLICIES))
def test_the_same_is_chosen_with_and_without_a_shadow(shadow: str) -> None:
    plain, watched = warm_world(), warm_world()
    watched.brain.shadow.set_policy(shadow)
    prompts = [prompt((seed % 3, 4), (seed, 4)) for seed in range(30)]
    chosen = [[world.decide(keys).replica for keys in prompts] for world in (plain, watched)]
    assert chosen[0] == chosen[1]
    report = watched.brain.shadow.report()
    assert (report["by_policy"]["warmroute"]["compared"], report["failed"]) == (30, 0)


def test_where_there_is_no_choice_nothing_is_compared() -> None:
    world = warm_world()
    world.brain.shadow.set_policy("random")
    world.decide(P, pin="r1")
    world.decide(P, exclude=frozenset({"r0", "r1"}))
    world.brain.explain(world.query(P))
    assert world.brain.shadow.report()["by_policy"] == {}


def test_a_shadow_that_raises_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("with words of a prompt")

    world = warm_world()
    world.brain.shadow.set_policy("least_load")
    monkeypatch.setattr("router.policies.least_load.least_loaded", broken)
    with caplog.at_level(logging.DEBUG):
        assert [world.decide(P).replica for _ in range(3)]
    assert world.brain.shadow.report()["failed"] == 3
    assert caplog.text.count("RuntimeError") == 1
    assert "words of a prompt" not in caplog.text


def test_what_is_kept_is_bounded_and_begins_anew() -> None:
    world = warm_world()
    shadow = world.brain.shadow
    shadow.set_policy("round_robin")
    for seed in range(3 * DIFFERENCES_KEPT):
        world.brain.set_policy(sorted(POLICIES)[seed % len(POLICIES)])
        world.decide(prompt((seed, 2)))
    report = shadow.report()
    assert len(report["differences"]) == DIFFERENCES_KEPT
    assert set(report["by_policy"]) == set(POLICIES)
    with pytest.raises(ValueError, match="unknown policy"):
        shadow.set_policy("nope")
    assert shadow.policy == "round_robin"
    shadow.set_policy("")
    world.decide(P)
    report = shadow.report()
    assert (report["shadow"], report["by_policy"], report["differences"]) == (None, {}, [])
    assert list(shadow.counts()) == []
