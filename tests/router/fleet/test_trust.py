"""Trust falls with predicted hits that don't happen, and says when nothing ever matches."""

from __future__ import annotations

import pytest

from router.fleet.trust import MISSES_FOR_ALARM, Prediction, Trust
from tests.router.kit import BLOCK_TOKENS, World, load, prompt

WARM = Prediction(512, 100.0)


def feed(trust: Trust, cached_tokens: int, times: int, ttft_ms: float = 100.0) -> None:
    for _ in range(times):
        trust.observe(WARM, cached_tokens, ttft_ms)


def test_hits_that_happen_keep_trust() -> None:
    trust = Trust()
    feed(trust, 512, 20)
    assert trust.value == pytest.approx(1.0)
    assert not trust.false_hits


def test_hits_that_do_not_happen_lose_it_and_later_ones_bring_it_back() -> None:
    trust = Trust()
    feed(trust, 0, 20)
    assert trust.value < 0.05
    assert trust.false_hits
    feed(trust, 512, 20)
    assert trust.value > 0.9
    assert not trust.false_hits


def test_what_was_evicted_while_waiting_says_little() -> None:
    trust = Trust()
    feed(trust, 0, 20, ttft_ms=60_000.0)
    assert trust.value > 0.99


def test_a_cold_prompt_says_nothing_about_trust() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe(Prediction(0, 100.0), 0, 100.0)
    assert trust.value == 1.0
    assert trust.samples == 0


def serve_unlike(world: World, seconds: float) -> None:
    """A new prompt every half second; the replica's digest shows other blocks."""
    for turn in range(int(2 * seconds)):
        keys = prompt((turn, 4))
        world.serve(world.decide(keys))
        world.hold("a", prompt((10_000 + turn, 4)))
        world.clock.pass_s(0.5)
        world.fleet.on_load("a", 1, load())


def test_R8_events_that_never_match_what_was_computed_are_named() -> None:
    world = World()
    world.join("a")
    serve_unlike(world, 10.0)
    assert [alarm.name for alarm in world.fleet.alarms] == ["nothing_matches"]
    assert world.fleet.member("a").trust.nothing_matches


def test_R8_a_digest_that_shows_them_raises_nothing() -> None:
    world = World()
    world.join("a")
    for turn in range(MISSES_FOR_ALARM * 4):
        keys = prompt((turn, 4))
        world.serve(world.decide(keys))
        world.hold("a", keys)
        world.clock.pass_s(2.0)
        world.fleet.on_load("a", 1, load())
    assert list(world.fleet.alarms) == []


def test_R8_what_was_shown_and_soon_evicted_is_no_miss() -> None:
    world = World()
    world.join("a")
    for turn in range(MISSES_FOR_ALARM * 2):
        keys = prompt((turn, 4))
        world.serve(world.decide(keys))
        world.hold("a", keys)
        world.clock.pass_s(0.1)
        world.hold("a")
        world.clock.pass_s(2.0)
        world.hold("a")
        world.fleet.on_load("a", 1, load())
    assert list(world.fleet.alarms) == []


@pytest.mark.parametrize(("total_blocks", "named"), [(64, False), (4_096, True)])
def test_R8_where_few_blocks_are_soon_recycled_none_is_missed(
    total_blocks: int, named: bool
) -> None:
    """Between two words of the digest a head came and went; where many are free it could not."""
    world = World()
    world.join("a")
    computed_tokens = 0
    for turn in range(MISSES_FOR_ALARM * 2):
        world.serve(world.decide(prompt((turn, 32))))
        world.clock.pass_s(2.0)
        computed_tokens += 2 * 32 * BLOCK_TOKENS
        world.hold("a")
        told = load(
            prompt_tokens_total=computed_tokens,
            free_blocks=total_blocks // 2,
            cached_blocks=total_blocks // 2,
            total_blocks=total_blocks,
        )
        world.fleet.on_load("a", 1, told)
    assert world.fleet.member("a").trust.nothing_matches is named


def serve_behind_a_public_head(world: World, turns: int, shown_blocks: int) -> None:
    for turn in range(turns):
        head, own = (1, 4), (100 + turn, 4)
        decision = world.decide(prompt(head, own), public_cut_blocks=4)
        world.serve(decision, decision.predicted_cached_tokens)
        world.hold("a", prompt(head, own) if shown_blocks > 4 else prompt(head))
        world.clock.pass_s(2.0)
        world.fleet.on_load("a", 1, load())
        world.brain.explain(world.query(prompt(head)))


def test_R8_salts_that_the_two_ends_derive_differently_are_named() -> None:
    world = World()
    world.join("a")
    serve_behind_a_public_head(world, MISSES_FOR_ALARM + 2, shown_blocks=4)
    assert [alarm.name for alarm in world.fleet.alarms] == ["salt_unknown"]
    serve_behind_a_public_head(world, 2, shown_blocks=8)
    assert list(world.fleet.alarms) == []
