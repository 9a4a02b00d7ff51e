"""The peers' rules, each by what its source says it does."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from events.decision import CandidateTerms
from router.choice.route import RouteQuery
from router.choice.sheet import TERMS, Best
from router.policies import make_policy
from router.policies.base import Candidate, Candidates, Pick
from tests.router.kit import BLOCK_TOKENS, World, prompt

BLOCKS = 10


def query(group: int = 1) -> RouteQuery:
    """A prompt of ten blocks and a token."""
    return World(1).query(prompt((group, BLOCKS)))


def one(replica: str, **changes: int) -> Candidate:
    base = Candidate(
        replica,
        overlap_blocks=0,
        requests=0,
        queued_prefill_tokens=0,
        used_blocks=0,
        total_blocks=100,
    )
    return replace(base, **changes)


def field(*made: Candidate, **terms: list[float]) -> Candidates:
    """As a survey would show them."""
    table = np.zeros((len(made), len(TERMS)))
    table[:, TERMS.index("overlap_blocks")] = [c.overlap_blocks for c in made]
    for name, values in terms.items():
        table[:, TERMS.index(name)] = values
    return Made(made, table)


class Made(Candidates):
    """Of a table, the first of which is the best."""

    def __init__(self, made: tuple[Candidate, ...], terms: np.ndarray) -> None:
        self._of, self._made = made, {}
        self.replicas, self.terms = [c.replica for c in made], terms
        self.best = Best()
        self.longest_blocks = max(c.overlap_blocks for c in made)
        self.may_fetch = True

    def _make(self, place: int) -> Candidate:
        return self._of[place]

    def shown(self, first: str | None = None) -> list[CandidateTerms]:
        return []


def chosen(policy: str, candidates: Candidates, group: int = 1) -> str:
    pick = make_policy(policy).pick(query(group), candidates, random.Random(1))
    return pick.replica


def test_power_of_two_never_takes_the_worst_and_draws_all_others() -> None:
    policy, rng = make_policy("power_of_two"), random.Random(1)
    candidates = field(*(one(f"r{n}", requests=n) for n in range(4)))
    names = Counter(policy.pick(query(), candidates, rng).replica for _ in range(300))
    assert names.keys() == {"r0", "r1", "r2"}
    assert names["r0"] > names["r1"] > names["r2"]
    assert chosen("power_of_two", field(one("alone"))) == "alone"


def owners(policy: str, names: list[str]) -> list[str]:
    rule, rng = make_policy(policy), random.Random(1)
    candidates = field(*map(one, names))
    return [rule.pick(query(g), candidates, rng).replica for g in range(1, 201)]


def test_a_replica_that_leaves_moves_only_its_own_heads() -> None:
    before = owners("bounded_hash", ["a", "b", "c", "d"])
    after = owners("bounded_hash", ["a", "b", "d"])
    assert set(before) == {"a", "b", "c", "d"}
    assert all(was in (now, "c") for was, now in zip(before, after, strict=True))


def test_a_full_one_passes_its_heads_on() -> None:
    free = field(*(one(f"r{n}", requests=4) for n in range(4)))
    own = chosen("bounded_hash", free)
    within = [one(c.replica, requests=5) for c in free]
    assert chosen("bounded_hash", field(*within)) == own
    beyond = [one(c.replica, requests=7 if c.replica == own else 4) for c in free]
    assert chosen("bounded_hash", field(*beyond)) != own


def test_longest_prefix_follows_the_match_until_the_gate_closes() -> None:
    warm, idle = one("warm", overlap_blocks=6, requests=64), one("idle")
    assert chosen("longest_prefix", field(warm, idle)) == "warm"
    assert chosen("longest_prefix", field(replace(warm, requests=65), idle)) == "idle"
    busy = one("idle", requests=100)
    assert chosen("longest_prefix", field(replace(warm, requests=149), busy)) == "warm"


def test_longest_prefix_sends_a_short_match_to_the_least_load() -> None:
    candidates = field(one("warm", overlap_blocks=3, requests=1), one("idle"))
    assert chosen("longest_prefix", candidates) == "idle"


@pytest.mark.parametrize(("active", "takes"), [(5, "warm"), (7, "idle")])
def test_block_cost_weighs_overlap_against_active_blocks(active: int, takes: str) -> None:
    rule, rng = make_policy("block_cost"), random.Random(1)
    warm = one("warm", overlap_blocks=6, requests=1)
    sent = World(1).query(prompt((9, active)))
    rule.placed(sent, field(replace(warm, requests=0)), Pick("warm", ""))
    assert rule.pick(query(), field(warm, one("idle")), rng).replica == takes


def test_block_cost_counts_the_queue_in_blocks() -> None:
    queued = one("warm", overlap_blocks=6, queued_prefill_tokens=7 * BLOCK_TOKENS)
    assert chosen("block_cost", field(queued, one("idle"))) == "idle"


def test_block_cost_counts_once_what_prompts_in_flight_share() -> None:
    rule, rng, world = make_policy("block_cost"), random.Random(1), World(1)

    def takes(warm: Candidate) -> str:
        return rule.pick(query(), field(warm, one("idle")), rng).replica

    for requests, tail in enumerate((20, 21, 22)):  # heads of eight blocks, tails of two
        sent = world.query(prompt((1, 8), (tail, 2)))
        rule.placed(sent, field(one("warm", requests=requests)), Pick("warm", ""))
    busy = one("warm", requests=3, overlap_blocks=7)
    assert takes(busy) == "warm"  # 3 + 14 + 2 blocks against 10 + 10
    assert takes(replace(busy, overlap_blocks=5)) == "idle"
    assert takes(replace(busy, overlap_blocks=5, requests=2)) == "warm"  # the oldest has ended
    assert takes(replace(busy, overlap_blocks=0, requests=0)) in ("warm", "idle")
    rule.placed(world.query(prompt((5, 1))), field(one("warm")), Pick("warm", ""))
    assert takes(one("warm", requests=1, overlap_blocks=2)) == "warm"  # all others have ended
    assert takes(one("warm", requests=1)) == "idle"


def test_weighted_sums_its_scores() -> None:
    half = one("half", overlap_blocks=5, requests=4)
    assert chosen("weighted", field(half, one("idle"))) == "idle"
    assert chosen("weighted", field(replace(half, requests=0), one("idle"))) == "half"
    assert chosen("weighted", field(one("used", used_blocks=90), one("free"))) == "free"


@pytest.mark.parametrize(("queued_tokens", "takes"), [(280_000, "warm"), (290_000, "idle")])
def test_weighted_sticks_until_18_s_are_lost(queued_tokens: int, takes: str) -> None:
    warm = one(
        "warm",
        overlap_blocks=9,
        requests=50,
        queued_prefill_tokens=queued_tokens,
        used_blocks=100,
    )
    assert chosen("weighted", field(warm, one("idle"))) == takes


def test_preble_exploits_what_is_mostly_cached() -> None:
    costs = {"prefill_ms": [1_000.0, 0.0]}
    assert chosen("preble", field(one("warm", overlap_blocks=6), one("idle"), **costs)) == "warm"
    assert chosen("preble", field(one("warm", overlap_blocks=5), one("idle"), **costs)) == "idle"


def test_preble_explores_where_load_eviction_and_prefill_are_least() -> None:
    policy, rng = make_policy("preble"), random.Random(1)
    candidates = field(one("a"), one("b"), prefill_ms=[10.0, 11.0], eviction_ms=[0.0, 5.0])
    first = policy.pick(query(), candidates, rng)
    policy.placed(query(), candidates, first)
    second = policy.pick(query(), candidates, rng)
    assert (first.replica, second.replica) == ("a", "b")


def test_preble_takes_from_the_heaviest() -> None:
    policy, rng = make_policy("preble"), random.Random(1)
    candidates = field(one("warm", overlap_blocks=8), one("idle"))
    names = []
    for _ in range(3):
        pick = policy.pick(query(), candidates, rng)
        policy.placed(query(), candidates, pick)
        names.append(pick.replica)
    assert names == ["warm", "idle", "warm"]
