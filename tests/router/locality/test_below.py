"""What replicas can fetch from below their devices: shown by digests, shared by store."""

from __future__ import annotations

import numpy as np

from events.decision import RouteDecision
from events.digest import positions
from events.load import DigestShape, FetchFit
from kvstore.identity import KeyChain
from router.locality.below import BelowIndex, Reach
from tests.router.kit import POOL, SHAPE, World, digest_bits, hello, load, prompt

LONG = prompt((0, 64))
OTHER = prompt((1, 64))
FAST = FetchFit(latency=1.0, per_block=0.5)
SLOW = FetchFit(latency=1.0, per_block=50.0)
WIDE = DigestShape(bits=SHAPE.bits, k=SHAPE.k, columns=3)


def part(chain: KeyChain, blocks: int) -> KeyChain:
    return KeyChain(chain.data[: 16 * blocks], b"")


def join(
    world: World,
    replica: str,
    *,
    device: tuple[KeyChain, ...] = (),
    host: tuple[KeyChain, ...] = (),
    remote: tuple[KeyChain, ...] = (),
    stores: tuple[str, ...] = ("", "far"),
    fetch: tuple[FetchFit, ...] = (FAST, FAST),
    peers: tuple[str, ...] = (),
) -> None:
    world.fleet.on_hello(replica, 1, hello(digest=WIDE, tiers=stores, peers=peers))
    world.fleet.link_state(replica, 1, True)
    world.fleet.on_load(replica, 1, load(fetch=fetch))
    bits = np.concatenate([digest_bits(*held) for held in (device, host, remote)])
    world.fleet.on_digest_reset(replica, 1, 1, 0, WIDE, bits)


def explained(world: World, chain: KeyChain) -> RouteDecision:
    """What would be chosen; nothing is promised by it."""
    answer = world.brain.explain(world.query(chain))
    assert isinstance(answer, RouteDecision)
    return answer


def terms(world: World, chain: KeyChain) -> dict[str, tuple[float, int, float]]:
    decision = explained(world, chain)
    return {
        one.replica: (one.transfer_ms, one.overlap_blocks, one.score) for one in decision.candidates
    }


def test_a_replica_whose_host_has_the_prefix_beats_a_cold_one_and_loses_to_a_warm_one() -> None:
    world = World()
    join(world, "cold")
    join(world, "host", host=(LONG,))
    assert explained(world, LONG).replica == "host"
    join(world, "warm", device=(LONG,))
    found = terms(world, LONG)
    assert found["host"][:2] == (1.0 + 64 * 0.5, 64)
    assert found["warm"][:2] == (0.0, 64)
    assert found["cold"][:2] == (0.0, 0)
    assert found["warm"][2] > found["host"][2] > found["cold"][2]


def test_only_what_is_faster_than_computing_is_fetched() -> None:
    world = World()
    join(world, "slow", host=(LONG,), fetch=(SLOW, SLOW))
    assert terms(world, LONG)["slow"][:2] == (0.0, 0)
    join(world, "far", host=(LONG,), remote=(LONG,), fetch=(SLOW, FAST))
    assert terms(world, LONG)["far"][:2] == (33.0, 64)


def test_runs_come_from_the_nearest_tier_that_has_them() -> None:
    world = World()
    join(world, "r", device=(part(LONG, 10),), host=(part(LONG, 30),), remote=(LONG,))
    transfer_ms, overlap, _ = terms(world, LONG)["r"]
    assert overlap == 64
    assert transfer_ms == (1.0 + 20 * 0.5) + (1.0 + 34 * 0.5)


def test_what_one_shows_of_a_shared_store_all_its_users_can_fetch() -> None:
    world = World()
    join(world, "a", host=(LONG,), remote=(OTHER,), stores=("one", "far"))
    join(world, "b", stores=("one", "far"))
    join(world, "c", stores=("two", "far"))
    join(world, "d", stores=("", ""))
    assert {name: blocks for name, (_, blocks, _) in terms(world, LONG).items()} == {
        "a": 64,
        "b": 64,
        "c": 0,
        "d": 0,
    }
    assert {name: blocks for name, (_, blocks, _) in terms(world, OTHER).items()} == {
        "a": 64,
        "b": 64,
        "c": 64,
        "d": 0,
    }


def test_what_another_hosts_replica_shows_a_peer_can_pull_at_its_own_speed() -> None:
    world = World()
    there = {"stores": ("there", "far")}
    here = {"stores": ("here", "far"), "peers": ("", "there")}
    join(world, "a", host=(LONG,), **there)
    join(world, "b", host=(part(LONG, 10),), fetch=(FAST, FAST, SLOW, FAST), **here)
    join(world, "c", fetch=(FAST, FAST, FAST, SLOW), **here)
    join(world, "d", stores=("here", "far"), peers=("here",), fetch=(FAST, FAST, FAST))
    join(world, "e", stores=("elsewhere", "far"), fetch=(FAST, FAST))
    found = terms(world, LONG)
    assert found["a"][:2] == (33.0, 64)
    assert found["b"][:2] == ((1.0 + 10 * 0.5) + (1.0 + 54 * 0.5), 64)
    assert found["c"][:2] == (1.0 + 10 * 0.5, 10)
    assert found["d"][:2] == (1.0 + 10 * 0.5, 10)
    assert found["e"][:2] == (0.0, 0)
    runs = world.decide(LONG, pin="b") and world.brain._open.popitem()[1].prediction.fetched
    assert [(run.tier, run.first // 16, run.end // 16) for run in runs] == [(0, 0, 10), (3, 10, 64)]


def test_a_peer_that_becomes_known_counts_from_then_on() -> None:
    world = World()
    join(world, "a", host=(LONG,), stores=("there", "far"))
    join(world, "b", stores=("here", "far"), peers=("",), fetch=(FAST, FAST, FAST))
    assert terms(world, LONG)["b"][:2] == (0.0, 0)
    told = hello(digest=WIDE, tiers=("here", "far"), peers=("there",))
    world.fleet.on_hello("b", 1, told)
    assert terms(world, LONG)["b"][:2] == (33.0, 64)
    world.fleet.on_gone("a", 1, "bye")
    assert terms(world, LONG)["b"][:2] == (0.0, 0)


def test_deltas_reach_the_column_that_they_lie_in() -> None:
    world = World()
    join(world, "r", device=(OTHER,))
    places = np.unique(positions(LONG.halves(), SHAPE)).astype(np.uint32)
    nothing = np.empty(0, np.uint32)
    host = places + np.uint32(SHAPE.bits)
    world.fleet.on_digest_delta("r", 1, 1, host, nothing)
    assert terms(world, LONG)["r"][:2] == (33.0, 64)
    assert terms(world, OTHER)["r"][:2] == (0.0, 64)
    world.fleet.on_digest_delta("r", 1, 2, nothing, host)
    assert terms(world, LONG)["r"][:2] == (0.0, 0)


def test_what_is_unknown_or_gone_is_not_counted() -> None:
    world = World()
    join(world, "r", host=(LONG,))
    world.fleet.on_digest_unknown("r", 1, "gap")
    assert terms(world, LONG)["r"][:2] == (0.0, 0)
    assert len(world.fleet.below) == 2
    world.fleet.on_gone("r", 1, "bye")
    assert len(world.fleet.below) == 0
    assert world.fleet.below.nbytes == 0


def test_fetched_blocks_need_room_on_the_device() -> None:
    world = World()
    join(world, "host", host=(LONG,))
    join(world, "warm", device=(LONG,))
    for name in ("host", "warm"):
        world.fleet.on_load(name, 1, load(free_blocks=20, fetch=(FAST, FAST)))
    decision = explained(world, LONG)
    overload = {one.replica: one.overload_ms for one in decision.candidates}
    assert overload["host"] > overload["warm"]


def test_a_tier_that_finds_no_room_stays_unknown() -> None:
    index = BelowIndex(max_bytes=0)
    index.reset("r", POOL, SHAPE, [digest_bits(LONG)])
    nothing = np.empty(0, np.uint32)
    index.apply("r", 0, nothing, nothing)
    depths = Reach(index, POOL, {"r": 0}, [[""], [""]]).depths(LONG.data)
    assert depths.tolist() == [[0], [0]]
