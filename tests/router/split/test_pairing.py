"""Who computes and who answers, by costs alone: no sockets, no time that passes by itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from events.load import FetchFit
from router.choice.route import HandOff
from router.split.pairing import (
    COLOCATED,
    FORGET_S,
    NO_STORE,
    NOBODY_COMPUTES,
    QUOTA,
    SHORT,
    Pair,
    Pairing,
)
from router.split.quota import DecodeQuota
from router.waiting.credit import Credit
from tests.router.kit import BLOCK_TOKENS, POOL, World, hello, load, prompt

LONG = prompt((1, 60))
SHARED = ("host:/kvd",)
TIGHT_MS = 60.0
"""Not much more than one row's step takes: roles are needed."""

FAST = (FetchFit(latency=1.0, per_block=0.1),)


class Split(World):
    """Replicas by role; all of them read and write one store."""

    def __init__(self, **roles: str) -> None:
        super().__init__()
        self.quota = DecodeQuota(self.brain.ledger, self.brain.peers, 0.9)
        self.pairing = Pairing(self.brain, self.quota, 256)
        for name, role in roles.items():
            self.enter(name, role)

    def enter(
        self,
        name: str,
        role: str,
        tiers: tuple[str, ...] = SHARED,
        peers: tuple[str, ...] = (),
    ) -> None:
        said = hello(role=role, tiers=tiers, peers=peers, max_running=10)
        self.fleet.on_hello(name, 1, said)
        self.fleet.link_state(name, 1, True)
        self.say(name)
        self.hold(name)

    def say(self, name: str, **changes: object) -> None:
        self.fleet.on_load(name, 1, load(**{"fetch": FAST, **changes}))

    def plan(self, **changes: object) -> Pair | str:
        return self.pairing.plan(self.query(LONG, **{"itl_deadline_ms": TIGHT_MS, **changes}))


def test_a_long_cold_prompt_is_computed_by_one_and_answered_by_another() -> None:
    world = Split(p0="prefill", d0="decode")
    pair = world.plan()
    assert isinstance(pair, Pair)
    assert (pair.prefill, pair.decode, pair.store, pair.blocks) == ("p0", "d0", SHARED[0], 60)
    assert pair.split_ms < pair.colocated_ms
    assert pair.prefill_ms == pytest.approx(965.0)


def test_without_such_roles_there_is_nothing_to_plan() -> None:
    assert not Split(r0="both", d0="decode").pairing.splits(POOL)
    assert Split(p0="prefill").pairing.splits(POOL)


def test_short_prompts_stay() -> None:
    world = Split(p0="prefill", d0="decode")
    assert world.pairing.plan(world.query(prompt((2, 15)))) == SHORT


def test_warm_prompts_stay() -> None:
    world = Split(p0="prefill", d0="decode")
    world.hold("d0", LONG)
    assert world.plan() == SHORT


def test_nobody_there_to_compute() -> None:
    world = Split(p0="prefill", d0="decode")
    world.fleet.link_state("p0", 1, False)
    assert world.plan() == NOBODY_COMPUTES


def test_a_congested_one_that_computes_is_left_alone() -> None:
    world = Split(p0="prefill", p1="prefill", d0="decode")
    world.say("p0", queued_prefill_tokens=9_000, waiting=9)
    pair = world.plan()
    assert isinstance(pair, Pair)
    assert pair.prefill == "p1"
    world.say("p1", queued_prefill_tokens=9_000, waiting=9)
    assert world.plan() == COLOCATED


def test_where_nothing_was_promised_a_role_only_breaks_ties() -> None:
    world = Split(p0="prefill", d0="decode")
    assert isinstance(world.plan(itl_deadline_ms=None), Pair)
    world.say("d0", fetch=(FetchFit(latency=10.0, per_block=1.0),))
    assert isinstance(world.plan(), Pair)
    world = Split(p0="prefill", d0="decode")
    world.say("d0", fetch=(FetchFit(latency=10.0, per_block=1.0),))
    assert world.plan(itl_deadline_ms=None) == COLOCATED


def test_the_nearer_gaps_come_to_the_promise_the_longer_a_prompt_waits_elsewhere() -> None:
    """Behind the queue of the one that computes, or among those that it would keep waiting."""
    world = Split(p0="prefill", d0="decode")
    world.say("d0", running=8)
    world.say("p0", queued_prefill_tokens=2_000, waiting=2)
    assert world.plan(itl_deadline_ms=None) == COLOCATED
    assert world.plan(itl_deadline_ms=1_000.0) == COLOCATED
    assert isinstance(world.plan(itl_deadline_ms=100.0), Pair)
    world.say("p0", queued_prefill_tokens=40_000, waiting=9)
    assert world.plan(itl_deadline_ms=100.0) == COLOCATED


def test_one_that_does_both_and_is_idle_needs_nobody() -> None:
    world = Split(p0="prefill", r0="both", d0="decode")
    assert world.plan() == COLOCATED
    world.say("r0", queued_prefill_tokens=9_000, waiting=9, running=9)
    assert isinstance(world.plan(), Pair)


def test_a_store_must_be_shared() -> None:
    world = Split(d0="decode")
    world.enter("p0", "prefill", ("elsewhere:/kvd",))
    assert world.plan() == NO_STORE
    world.enter("p1", "prefill", ("", "remote"))
    world.enter("d1", "decode", ("here:/kvd", "remote"))
    world.say("d1", fetch=(*FAST, *FAST))
    pair = world.plan()
    assert isinstance(pair, Pair)
    assert (pair.prefill, pair.decode, pair.store) == ("p1", "d1", "remote")


def test_another_host_s_store_is_read_by_who_names_that_host_a_peer() -> None:
    world = Split(p0="prefill")
    world.enter("d0", "decode", ("there:/kvd",))
    assert world.plan() == NO_STORE
    world.enter("d1", "decode", ("there:/kvd",), ("", *SHARED))
    assert world.plan() == COLOCATED  # until its speed is told it is out of reach
    world.say("d1", fetch=(*FAST, *FAST, *FAST))
    pair = world.plan()
    assert isinstance(pair, Pair)
    assert (pair.prefill, pair.decode, pair.store) == ("p0", "d1", SHARED[0])
    world.say("d1", fetch=(*FAST, *FAST, FetchFit(latency=1e9, per_block=1e9)))
    assert world.plan() == COLOCATED
    world.say("d1", fetch=(*FAST, *FAST, *FAST))
    brought = HandOff("split", "p0", SHARED[0], 60)
    decision = world.decide(LONG, hand_off=brought)
    assert (decision.replica, decision.predicted_cached_tokens) == ("d1", 60 * BLOCK_TOKENS)


def test_a_store_that_is_too_slow_is_not_used() -> None:
    world = Split(p0="prefill", d0="decode")
    world.say("d0", fetch=(FetchFit(latency=1e9, per_block=1e9),))
    assert world.plan() == COLOCATED


def test_those_that_answer_are_sent_no_more_than_they_have_room_for() -> None:
    world = Split(p0="prefill", d0="decode", d1="decode")
    with world.quota.pledge("d1", 60):
        pair = world.plan()
        assert isinstance(pair, Pair)
        world.say("d0", running=9)
        assert (after := world.plan()) != QUOTA
        assert isinstance(after, Pair)
        assert after.decode == "d1"
        world.say("d1", running=8)
        assert world.plan() == QUOTA
    world.say("d0", running=1)
    world.say("d1", running=1)
    assert isinstance(world.plan(), Pair)
    world.say("d0", free_blocks=20)
    world.say("d1", free_blocks=20)
    assert world.plan() == QUOTA
    assert world.quota.pledged("d1") == 0


def test_what_a_hand_off_takes_beyond_its_prefill_is_learnt() -> None:
    world = Split(p0="prefill", d0="decode")
    before = world.plan()
    for _ in range(50):
        world.pairing.learn(SHARED[0], 400.0)
    after = world.plan()
    assert isinstance(before, Pair)
    assert isinstance(after, Pair)
    assert after.split_ms > before.split_ms + 300.0
    for _ in range(50):
        world.pairing.learn(SHARED[0], 9_000.0)
    assert world.plan() == COLOCATED


def test_a_store_that_was_slow_once_is_tried_again() -> None:
    """Nothing is learnt of whom one does not ask: what was learnt has to fade."""
    world = Split(p0="prefill", d0="decode")
    for _ in range(50):
        world.pairing.learn(SHARED[0], 9_000.0)
    assert world.plan() == COLOCATED
    world.clock.pass_s(10 * FORGET_S)
    world.say("p0")
    world.say("d0")
    world.hold("d0")
    assert isinstance(world.plan(), Pair)


def test_what_was_brought_counts_before_any_digest_shows_it() -> None:
    world = Split(p0="prefill", d0="decode", d1="decode")
    world.enter("d2", "decode", ("elsewhere:/kvd",))
    decision = world.decide(LONG, hand_off=HandOff("split", "p0", SHARED[0], 60, 12.0))
    assert decision.predicted_cached_tokens == 60 * BLOCK_TOKENS
    assert (decision.hand_off, decision.prefilled_by, decision.hand_off_ms) == ("split", "p0", 12.0)
    terms = {of.replica: of for of in decision.candidates}
    assert decision.replica in ("d0", "d1")
    assert terms["d0"].transfer_ms == terms["d1"].transfer_ms == pytest.approx(7.0)
    assert terms["d2"].transfer_ms == 0.0
    refused = world.decide(LONG, hand_off=HandOff(SHORT))
    assert (refused.hand_off, refused.prefilled_by) == (SHORT, "")


def test_a_deadline_counts_what_the_hand_off_takes() -> None:
    world = Split(p0="prefill", r0="both")
    world.say("r0", running=1, queued_prefill_tokens=200, waiting=1)
    query = world.query(LONG, ttft_deadline_ms=2_000.0, itl_deadline_ms=120.0)
    relaxed = world.pairing.plan(query)
    world.say("p0", queued_prefill_tokens=500, waiting=1)
    tight = world.pairing.plan(replace(query, ttft_deadline_ms=970.0))
    assert isinstance(relaxed, Pair)
    assert tight == COLOCATED


def test_a_place_to_be_answered_is_what_the_queue_waits_for() -> None:
    world = Split(p0="prefill", d0="decode")
    credit = Credit(world.fleet, world.brain.ledger, 1e9, world.clock)
    for seed in range(10):
        assert credit.room(POOL)
        world.decide(prompt((100 + seed, 2)), itl_deadline_ms=TIGHT_MS)
    assert not credit.room(POOL)
    world.fleet.on_gone("d0", 1, "dead")
    assert credit.room(POOL)


def test_a_place_at_one_that_helps_is_one() -> None:
    world = Split(p0="prefill", d0="decode")
    fleet, ledger = world.fleet, world.brain.ledger
    credit = Credit(fleet, ledger, 1e9, world.clock, world.brain.helpers)
    placed = []
    for seed in range(14):
        assert credit.room(POOL)
        placed.append(world.decide(prompt((100 + seed, 2)), itl_deadline_ms=TIGHT_MS).replica)
    assert placed == ["d0"] * 10 + ["p0"] * 4
    # As busy as this it is left to its prompts, even while nobody else has a seat.
    world.keep_busy("p0")
    world.keep_busy("p0")
    world.say("d0", running=10)
    world.clock.pass_s(1.0)
    world.say("p0", running=4)
    world.say("d0", running=10)
    world.decide(prompt((200, 2)), itl_deadline_ms=TIGHT_MS)
    assert not credit.room(POOL)
