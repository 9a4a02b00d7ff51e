"""Each term of the cost: it turns a choice where it should, and is the same for all elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest

from events.decision import CandidateTerms, RouteDecision
from events.load import DecodeFit
from router.choice.route import NoReplica
from router.policies.heat import HOT_REQUESTS
from tests.router.kit import BLOCK_TOKENS, World, hello, load, prompt

P = prompt((1, 64))
HALF = prompt((1, 32))
FREE_DECODE = DecodeFit(0.0, 0.0, 0.0, 1.0)


def by_replica(decision: RouteDecision) -> dict[str, CandidateTerms]:
    return {terms.replica: terms for terms in decision.candidates}


def without(decision: RouteDecision, term: str) -> str:
    """Who would have won without it."""
    scores = {t.replica: t.score + getattr(t, term) for t in decision.candidates}
    return max(scores, key=scores.__getitem__)


def tell(world: World, replica: str, **changes: object) -> None:
    world.fleet.on_load(replica, 1, load(decode=FREE_DECODE, **changes))


def full(reused: int) -> dict[str, object]:
    """No free block, and so many of 100,000 prompt tokens found cached."""
    return {
        "free_blocks": 0,
        "cached_blocks": 4_000,
        "prompt_tokens_total": 100_000,
        "cached_tokens_total": reused,
    }


@pytest.mark.parametrize(("more", "blocks"), [(-1, 63), (0, 63), (1, 64)])
def test_C7_the_block_with_the_last_token_is_never_said_to_be_cached(
    more: int, blocks: int
) -> None:
    world = World(1)
    world.hold("r0", P)
    decision = world.decide(P, prompt_tokens=len(P) * BLOCK_TOKENS + more)
    assert decision.predicted_cached_tokens == blocks * BLOCK_TOKENS


def test_harm_keeps_a_prefill_away_from_running_decodes() -> None:
    world = World(2)
    world.hold("r0", prompt((1, 4)))
    tell(world, "r0", running=20)
    tell(world, "r1")
    decision = world.decide(P)
    assert (decision.replica, without(decision, "harm_ms")) == ("r1", "r0")


@pytest.mark.parametrize("rows", [0, 20])
def test_harm_changes_nothing_where_as_many_decode_everywhere(rows: int) -> None:
    world = World(2)
    world.hold("r0", prompt((1, 4)))
    for replica in ("r0", "r1"):
        tell(world, replica, running=rows)
    decision = world.decide(P)
    assert decision.replica == without(decision, "harm_ms") == "r0"


def behind_a_long_one(**changes: object) -> RouteDecision:
    """r0 holds most of a prompt, and computes another one that takes two seconds."""
    world = World()
    world.fleet.on_hello("r0", 1, hello(**changes))
    world.fleet.link_state("r0", 1, True)
    tell(world, "r0")
    world.hold("r0", prompt((1, 62)))
    world.decide(prompt((9, 125)))
    world.join("r1")
    tell(world, "r1")
    return world.decide(P)


def test_a_short_prefill_does_not_wait_for_a_long_one() -> None:
    decision = behind_a_long_one()
    assert decision.replica == "r0"
    assert by_replica(decision)["r0"].queue_ms == 0


def test_but_it_makes_the_long_one_wait() -> None:
    terms = by_replica(behind_a_long_one())["r0"]
    assert terms.harm_ms == pytest.approx(terms.prefill_ms * 2_006 / 2_048)


def test_another_engine_serves_in_the_order_of_arrival() -> None:
    decision = behind_a_long_one(engine="vllm")
    assert decision.replica == "r1"
    assert by_replica(decision)["r0"].queue_ms == pytest.approx(2_006)


def test_who_waits_for_blocks_waits_for_those_who_bring_them() -> None:
    world = World(2)
    world.keep_busy("r0", "r1")
    first = world.decide(prompt((1, 128)))
    sibling = world.decide(prompt((1, 128), (2, 1)))
    assert sibling.replica == first.replica
    assert by_replica(sibling)[first.replica].queue_ms == pytest.approx(2_054, rel=0.01)


@pytest.mark.parametrize("busy", [True, False])
def test_of_two_ways_to_the_same_first_token_a_busy_fleet_takes_the_cheaper(busy: bool) -> None:
    world = World(2)
    if busy:
        world.keep_busy("r0", "r1")
    world.hold("r0", HALF)
    tell(world, "r0", waiting=1, queued_prefill_tokens=530)
    tell(world, "r1")
    decision = world.decide(P)
    assert (decision.replica, without(decision, "harm_ms")) == ("r0" if busy else "r1", "r1")


def test_eviction_damage_turns_a_choice_where_reused_blocks_must_go() -> None:
    world = World(2)
    world.hold("r0", prompt((1, 8)))
    tell(world, "r0", **full(reused=90_000))
    tell(world, "r1")
    decision = world.decide(P)
    assert (decision.replica, without(decision, "eviction_ms")) == ("r1", "r0")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"free_blocks": 4_096, "cached_blocks": 0}, id="room"),
        pytest.param(full(reused=0) | {"prompt_tokens_total": 10**8}, id="nothing reused"),
        pytest.param({"free_blocks": 0, "cached_blocks": 0}, id="nothing cached"),
    ],
)
def test_eviction_damage_is_nothing_where_nothing_of_use_goes(state: dict[str, object]) -> None:
    world = World(2)
    world.hold("r0", prompt((1, 8)))
    tell(world, "r0", **state)
    tell(world, "r1")
    assert by_replica(world.decide(P))["r0"].eviction_ms < 1.0


def test_who_finds_little_cached_is_no_cheaper_place_for_what_is_new() -> None:
    world = World(2)
    tell(world, "r0", **full(reused=90_000))
    tell(world, "r1", **full(reused=10_000))
    terms = by_replica(world.decide(P))
    assert terms["r0"].eviction_ms == terms["r1"].eviction_ms > 1.0


def late_world() -> World:
    """r0 is cheap for all together, but its queue is long; r1 is sooner, and must evict."""
    world = World(2)
    world.hold("r0", P)
    world.hold("r1", HALF)
    tell(world, "r0", waiting=1, queued_prefill_tokens=900)
    tell(world, "r1", **full(reused=90_000))
    return world


def test_lateness_prefers_who_keeps_the_deadline() -> None:
    decision = late_world().decide(P, ttft_deadline_ms=700.0)
    assert (decision.replica, without(decision, "lateness_ms")) == ("r1", "r0")
    assert decision.predicted_ttft_ms <= 700.0


@pytest.mark.parametrize("deadline_ms", [None, 2_000.0])
def test_lateness_is_nothing_where_the_deadline_is_far(deadline_ms: float | None) -> None:
    decision = late_world().decide(P, ttft_deadline_ms=deadline_ms)
    assert decision.replica == "r0"
    assert {terms.lateness_ms for terms in decision.candidates} == {0.0}


def test_feasibility_is_each_requests_own() -> None:
    world = late_world()
    tight = world.brain.decide(world.query(P, ttft_deadline_ms=100.0))
    assert not isinstance(tight, NoReplica), "r1 has no queue that others could leave"
    tell(world, "r1", waiting=1, queued_prefill_tokens=400)
    tight = world.brain.decide(world.query(P, ttft_deadline_ms=100.0))
    assert isinstance(tight, NoReplica)
    assert (tight.reason, tight.retry_after_s) == ("deadline", 1.0)
    assert tight.candidates[0].lateness_ms > 0
    for deadline_ms in (5_000.0, None):
        answer = world.brain.explain(world.query(P, ttft_deadline_ms=deadline_ms))
        assert isinstance(answer, RouteDecision)
        assert answer.replica == "r0"


def test_overload_turns_a_choice_where_no_slot_is_free() -> None:
    world = World(2)
    world.hold("r0", HALF)
    slow = DecodeFit(50.0, 0.0, 0.0, 1.0)
    for replica, running, waiting in (("r0", 32, 16), ("r1", 31, 0)):
        world.fleet.on_load(replica, 1, load(running=running, waiting=waiting, decode=slow))
    decision = world.decide(P)
    assert (decision.replica, without(decision, "overload_ms")) == ("r1", "r0")
    assert by_replica(decision)["r1"].overload_ms == 0.0


def test_overload_is_suspicion_where_a_replica_failed_and_nothing_where_all_is_well() -> None:
    world = World(2)
    assert {terms.overload_ms for terms in world.decide(P).candidates} == {0.0}
    world.fleet.replica_failed("r0", 1)
    assert by_replica(world.decide(P))["r0"].overload_ms > 0.0


def serve(world: World, count: int, tail: int) -> Counter[str]:
    """One after the other, on a head that all share."""
    placed: Counter[str] = Counter()
    for number in range(count):
        decision = world.decide(prompt((1, 32), (tail + number, 4)))
        world.serve(decision, decision.predicted_cached_tokens)
        placed[decision.replica] += 1
    return placed


def test_R2_a_head_that_is_not_yet_hot_stays_where_it_is() -> None:
    assert len(serve(World(4), HOT_REQUESTS - 1, 1_000)) == 1


def test_R2_a_hot_head_is_not_spread_to_who_waits_longer() -> None:
    world = World(4)
    for replica in ("r1", "r2", "r3"):
        world.fleet.on_load(replica, 1, load(waiting=1, queued_prefill_tokens=600))
    assert serve(world, 40, 1_000) == {"r0": 40}


def test_R2_a_head_gets_no_more_holders_than_its_share_of_the_traffic() -> None:
    world = World(4)
    heads: Counter[str] = Counter()
    for number in range(120):
        shared = number % 4 == 0
        keys = prompt((1, 32), (number, 4)) if shared else prompt((5_000 + number, 36))
        decision = world.decide(keys)
        world.serve(decision, decision.predicted_cached_tokens)
        if shared and not decision.predicted_cached_tokens:
            heads[decision.replica] += 1
    assert sum(heads.values()) <= 2


def test_the_hot_spot_guard_misses_no_deadline() -> None:
    world = World(4)
    placed: Counter[str] = Counter()
    for number in range(40):
        keys = prompt((1, 64), (number, 1))
        decision = world.decide(keys, ttft_deadline_ms=1_100.0 if number == 0 else 300.0)
        world.serve(decision, decision.predicted_cached_tokens)
        placed[decision.replica] += 1
    assert len(placed) == 1
