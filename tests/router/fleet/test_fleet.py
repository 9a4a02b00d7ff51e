"""Membership, pools, fences and alarms."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from events.load import AdapterNote, DigestShape
from kvstore.identity import HASH_VERSION
from router.choice.route import NoReplica
from router.fleet.evidence import STALE_DIGEST_AFTER_S
from router.fleet.fleet import MAX_REPLICAS, Fleet
from tests.router.kit import EXPECTED, LAYOUT, POOL, SHAPE, World, digest_bits, hello, load, prompt

P = prompt((1, 40))
NOTHING = np.zeros(0, np.uint32)


def alarms(world: World) -> set[str]:
    return {alarm.name for alarm in world.fleet.alarms}


@pytest.mark.parametrize(
    ("changes", "alarm", "reason"),
    [
        ({"model": "other\nline" * 99}, "model_mismatch", "says 'other\\nline"),
        ({"weights": "00"}, "weights_mismatch", "says '00', wanted is 'aaa"),
        ({"tokenizer": "00"}, "tokenizer_mismatch", "'00'"),
        ({"template": "00"}, "template_mismatch", "'00'"),
        ({"key_id": "00"}, "key_mismatch", "'00'"),
        ({"hash_version": "v0"}, "hash_version_mismatch", f"'v0', wanted is '{HASH_VERSION}'"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, block_tokens=32)},
            "block_size_mismatch",
            "says 32 tokens, wanted is 16",
        ),
        ({"layout": msgspec.structs.replace(LAYOUT, layers=9)}, "layout_mismatch", "'(9, "),
        ({"digest": DigestShape(bits=100, k=8)}, "digest_shape_refused", "100 bits"),
    ],
)
def test_R8_a_replica_that_does_not_fit_is_refused_by_name(
    changes: dict[str, object], alarm: str, reason: str
) -> None:
    world = World()
    world.fleet.on_hello("a", 1, hello(**changes))
    world.fleet.link_state("a", 1, True)
    world.fleet.on_load("a", 1, load())
    told = {of.name: of.detail for of in world.fleet.alarms}
    assert told[alarm].startswith("refused: ")
    assert reason in told[alarm]
    assert "\n" not in told[alarm]
    assert len(told[alarm]) < 200
    assert world.fleet.targets() == {}
    assert world.fleet.pools() == {}
    assert isinstance(world.brain.decide(world.query(P)), NoReplica)
    world.fleet.on_hello("a", 1, hello())
    assert alarms(world) == set()
    assert world.decide(P).replica == "a"


def test_another_content_under_an_adapters_name_bars_that_adapter_alone() -> None:
    expected = replace(EXPECTED, adapters=frozenset({("x", "one"), ("y", "two")}))
    fleet = Fleet(expected, World().clock)
    y = AdapterNote("y", "two", True, 5.0)
    fleet.on_hello("a", 1, hello(adapters=(AdapterNote("x", "one", True, 5.0), y)))
    fleet.on_hello("b", 1, hello(adapters=(AdapterNote("x", "other", True, 5.0), y)))
    # What this router does not know nobody can ask it for.
    fleet.on_hello("c", 1, hello(adapters=(AdapterNote("z", "two", True, 5.0),)))
    (alarm,) = fleet.alarms
    assert (alarm.name, alarm.replica) == ("adapter_mismatch", "b")
    assert alarm.detail.endswith(": x")
    assert sorted(fleet.targets()) == ["a", "b", "c"]
    (pool,) = fleet.pools().values()
    assert pool.replicas == ("a", "b", "c")
    fleet.on_hello("b", 2, hello(adapters=(AdapterNote("x", "one", True, 5.0), y)))
    assert not len(fleet.alarms)


def test_two_layouts_are_two_pools() -> None:
    world = World(2)
    world.fleet.on_hello("b", 1, hello(layout=msgspec.structs.replace(LAYOUT, dtype="bfloat16")))
    pools = world.fleet.pools()
    assert next(iter(pools)) == POOL
    assert [pool.replicas for pool in pools.values()] == [("r0", "r1"), ("b",)]
    assert pools[POOL].block_tokens == 16


def test_whoever_stands_beside_the_largest_pool_is_named() -> None:
    """Such a replica is well, and would compute without a word what others hold."""
    world = World(2)
    world.join("b")
    world.fleet.on_hello("b", 1, hello(layout=msgspec.structs.replace(LAYOUT, dtype="bfloat16")))
    world.clock.pass_s(1.0)
    world.fleet.on_load("b", 1, load())
    assert alarms(world) == {"other_pool"}
    assert world.fleet.alarms.active("other_pool", "b")
    world.fleet.on_hello("b", 1, hello())
    world.clock.pass_s(1.0)
    world.fleet.on_load("b", 1, load())
    assert alarms(world) == set()


def test_no_link_no_traffic() -> None:
    world = World(2)
    world.fleet.link_state("r0", 1, False)
    assert {world.decide(P).replica for _ in range(8)} == {"r1"}
    world.fleet.link_state("r0", 1, True)
    assert {world.decide(P).replica for _ in range(16)} == {"r0", "r1"}


def test_the_link_of_a_former_life_does_not_count() -> None:
    world = World(1)
    world.fleet.on_hello("r0", 2, hello())
    assert world.fleet.targets() == {"r0": (2, "ws://127.0.0.1:9/link")}
    assert isinstance(world.brain.decide(world.query(P)), NoReplica)
    world.fleet.link_state("r0", 1, False)
    world.fleet.link_state("r0", 2, True)
    assert world.decide(P).replica == "r0"


def test_a_link_that_is_ahead_of_the_hello_counts_once_it_comes() -> None:
    world = World(1)
    world.fleet.link_state("r0", 2, True)
    assert isinstance(world.brain.decide(world.query(P)), NoReplica)
    world.fleet.on_hello("r0", 2, hello())
    assert world.decide(P).replica == "r0"


def test_R17_a_replica_that_comes_back_while_its_link_stands_is_routable() -> None:
    world = World(1)
    world.fleet.on_gone("r0", 1, "silent")
    world.fleet.link_state("r0", 1, False)
    assert len(world.fleet) == 0
    world.fleet.link_state("r0", 1, True)
    world.fleet.on_hello("r0", 1, hello())
    assert world.decide(P).replica == "r0"


def test_a_replica_that_hangs_gets_nothing_while_another_is_heard() -> None:
    world = World()
    world.join("hangs", held=(P,))
    world.join("heard")
    for _ in range(20):
        world.clock.pass_s(0.25)
        world.fleet.on_load("heard", 1, load())
    decision = world.decide(P)
    assert decision.replica == "heard"
    assert decision.candidates[-1].filtered == "unheard"
    assert world.decide(P, exclude=frozenset({"heard"})).replica == "hangs"
    world.fleet.on_load("hangs", 1, load())
    assert world.decide(P).replica == "hangs"


def test_R13_a_replica_whose_reports_come_late_keeps_its_traffic_and_its_index() -> None:
    world = World()
    world.join("late", held=(P,))
    world.join("prompt")
    for _ in range(6):
        for _ in range(11):
            world.clock.pass_s(0.25)
            world.fleet.on_load("prompt", 1, load())
            warm = world.brain.explain(world.query(P))
            assert (warm.replica, warm.predicted_cached_tokens) == ("late", len(P) * 16)
        world.fleet.on_load("late", 1, load())
        world.fleet.on_digest_delta("late", 1, 0, NOTHING, NOTHING)


def test_where_only_the_bus_is_silent_everybody_is_asked() -> None:
    world = World(2)
    world.clock.pass_s(20.0)
    assert {world.decide(P).replica for _ in range(16)} == {"r0", "r1"}


def test_E8_a_larger_boot_starts_empty_and_old_messages_are_ignored() -> None:
    world = World()
    world.join("a", boot=5, held=(P,))
    decision = world.decide(P)
    for _ in range(3):
        world.fleet.replica_failed("a", 5)
    world.fleet.on_hello("a", 6, hello())
    world.fleet.link_state("a", 6, True)
    assert len(world.brain.ledger) == 0
    assert len(world.brain.optimistic) == 0
    # Twenty messages of the old life, late.
    for seq in range(20):
        world.fleet.on_hello("a", 5, hello())
        world.fleet.on_load("a", 5, load(queued_prefill_tokens=9_999))
        world.fleet.on_digest_reset("a", 5, 1, seq, SHAPE, digest_bits(P))
        world.fleet.on_digest_delta("a", 5, seq, np.arange(9, dtype=np.uint32), NOTHING)
    world.fleet.on_gone("a", 5, "silent")
    world.end(decision, "transport", replica_fault=True)
    view = world.fleet.replicas()[0]
    assert (view.boot, view.digest_known, view.load, view.trust) == (6, False, None, 1.0)
    fresh = world.decide(P)
    assert fresh.predicted_cached_tokens == 0
    assert world.fleet.member("a").breaker.failures == 0


def test_E4_a_replica_whose_digest_never_comes_is_named_and_locality_what_was_sent() -> None:
    world = World()
    for name in ("a", "b"):
        world.fleet.on_hello(name, 1, hello())
        world.fleet.link_state(name, 1, True)
    first = world.decide(P)
    world.serve(first)
    within_s = 10.0
    for _ in range(int(within_s / 0.25)):
        world.clock.pass_s(0.25)
        for name in ("a", "b"):
            world.fleet.on_load(name, 1, load())
    assert alarms(world) == {"no_events"}
    again = world.decide(P)
    assert again.replica == first.replica
    assert again.predicted_cached_tokens == len(P) * 16
    assert {terms.locality for terms in again.candidates} == {"optimistic"}
    assert {view.locality for view in world.fleet.replicas()} == {"optimistic"}
    world.hold("a", P)
    world.hold("b")
    assert alarms(world) == set()
    assert {terms.locality for terms in world.decide(P).candidates} == {"digest"}


def test_a_digest_that_is_no_longer_confirmed_is_stale_and_fades() -> None:
    world = World()
    world.join("a", held=(P,))
    fresh = world.decide(P).candidates[0]
    for _ in range(40):
        world.clock.pass_s(1.0)
        world.fleet.on_load("a", 1, load(digest_seq=7))
    assert world.clock.now_s - 1_000 > STALE_DIGEST_AFTER_S
    assert alarms(world) == {"stale_digest"}
    assert world.decide(P).candidates[0].saved_prefill_ms < 0.5 * fresh.saved_prefill_ms
    world.fleet.on_digest_delta("a", 1, 7, NOTHING, NOTHING)
    world.clock.pass_s(1.0)
    world.fleet.on_load("a", 1, load(digest_seq=7))
    assert alarms(world) == set()


def test_E5_a_gap_drops_locality_only_and_a_snapshot_brings_it_back() -> None:
    world = World()
    world.join("a", held=(P,))
    world.fleet.on_digest_unknown("a", 1, "gap")
    assert world.decide(P).predicted_cached_tokens == 0
    world.brain.optimistic.forget_replica("a")
    world.hold("a", P)
    assert world.decide(P).predicted_cached_tokens == len(P) * 16


def test_a_delta_without_a_digest_is_ignored() -> None:
    world = World(1)
    world.fleet.on_digest_unknown("r0", 1, "gap")
    world.fleet.on_digest_delta("r0", 1, 3, np.arange(5, dtype=np.uint32), NOTHING)
    assert not world.fleet.index.known("r0")


def test_a_digest_that_contradicts_its_shape_is_named_not_believed() -> None:
    world = World(1)
    world.fleet.on_digest_reset("r0", 1, 1, 0, SHAPE, np.zeros(3, np.uint8))
    assert alarms(world) == {"bad_digest"}
    assert world.decide(P).predicted_cached_tokens == 0


def test_a_replica_that_says_bye_is_gone_at_once() -> None:
    world = World(1)
    world.fleet.on_gone("r0", 1, "draining")
    assert len(world.fleet) == 0
    assert world.fleet.index.nbytes == 0


def test_E9_a_silent_bus_does_not_stop_traffic_over_a_standing_link() -> None:
    world = World()
    world.join("a", held=(P,))
    world.fleet.on_gone("a", 1, "silent")
    assert world.decide(P).predicted_cached_tokens == 0
    world.fleet.link_state("a", 1, False)
    assert len(world.fleet) == 0


def test_a_draining_replica_gets_nothing_new_but_keeps_its_link() -> None:
    world = World(2)
    world.fleet.on_load("r0", 1, load(draining=True))
    assert {world.decide(P).replica for _ in range(6)} == {"r1"}
    assert set(world.fleet.targets()) == {"r0", "r1"}
    assert world.fleet.replicas()[0].state == "draining"


def test_absurd_time_models_from_the_wire_are_not_used() -> None:
    world = World(2)
    poison = msgspec.structs.replace(load().prefill, b=float("nan"))
    world.fleet.on_load("r0", 1, load(prefill=poison))
    assert np.isfinite(world.decide(P).predicted_ttft_ms)


def test_R9_a_fleet_that_is_full_says_so() -> None:
    world = World()
    for number in range(MAX_REPLICAS + 1):
        world.fleet.on_hello(f"r{number}", 1, hello())
    assert len(world.fleet) == MAX_REPLICAS
    assert alarms(world) == {"fleet_full"}


def test_E4_a_dead_bus_is_named_and_no_replica_for_it() -> None:
    world = World()
    world.fleet.on_hello("a", 1, hello())
    world.fleet.link_state("a", 1, True)
    world.fleet.on_load("a", 1, load())
    world.fleet.on_digest_unknown("a", 1, "reconnect")

    def after_s(seconds: float) -> set[str]:
        world.clock.pass_s(seconds)
        world.fleet.check()
        return alarms(world)

    seen = set().union(*(after_s(0.5) for _ in range(60)))
    assert seen == {"bus_silent"}
    world.fleet.on_load("a", 1, load())
    assert after_s(0.5) == set(), "the snapshot is on its way"
    for _ in range(20):
        world.fleet.on_load("a", 1, load())
        named = after_s(0.5)
    assert named == {"no_events"}


def test_E10_a_bus_that_is_silent_while_links_stand_is_named() -> None:
    world = World()
    for name in ("a", "b"):
        world.fleet.on_hello(name, 1, hello())
        world.fleet.link_state(name, 1, True)
        world.fleet.on_load(name, 1, load())
        world.hold(name)

    def after_s(seconds: float, *heard: str) -> set[str]:
        world.clock.pass_s(seconds)
        for name in heard:
            world.fleet.on_load(name, 1, load())
        world.fleet.check()
        return alarms(world) & {"bus_silent"}

    assert not after_s(2.0)
    assert not after_s(2.0, "b"), "only one is silent"
    assert after_s(4.0) == {"bus_silent"}
    assert not after_s(1.0, "a")
    assert after_s(4.0) == {"bus_silent"}
    world.fleet.link_state("a", 1, False)
    world.fleet.link_stalled("b", 1, True)
    assert not after_s(1.0), "who hangs tells nothing of the bus"
