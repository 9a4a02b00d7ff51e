"""The choice itself: load, locality, filters, reservations, and what is told of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from events.decision import RouteDecision
from events.load import DecodeFit
from router.choice.reserve import Booked
from router.choice.route import NoReplica, Outcome
from router.policies import POLICIES
from tests.router.kit import World, hello, load, prompt

P = prompt((1, 64))


def distinct(count: int, blocks: int = 20) -> list:
    return [prompt((1_000 + number, blocks)) for number in range(count)]


def spread(decisions: list[RouteDecision]) -> Counter[str]:
    return Counter(decision.replica for decision in decisions)


@pytest.mark.parametrize("seed", range(5))
def test_R1_a_burst_at_idle_replicas_with_stalled_reports_is_spread(seed: int) -> None:
    world = World(4, seed=seed)
    counts = spread([world.decide(keys) for keys in distinct(32)])
    assert len(counts) == 4
    assert all(6 <= count <= 10 for count in counts.values())


BY_CHANCE = {"random", "bounded_hash", "power_of_two"}


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - BY_CHANCE))
def test_R1_holds_for_every_rule_that_looks_at_load(policy: str) -> None:
    world = World(4, policy=policy)
    counts = spread([world.decide(keys) for keys in distinct(32)])
    assert all(6 <= count <= 10 for count in counts.values()), counts


def test_R1_reports_that_saw_part_of_a_burst_are_not_counted_twice() -> None:
    world = World(2)
    sent = [world.decide(keys) for keys in distinct(4)]
    last = dict.fromkeys(("r0", "r1"), 0)
    for decision in sent:
        last[decision.replica] = decision.dispatch_seq
    for replica, seq in last.items():
        queued = 2 * 321
        seen = {world.brain.router_boot: seq}
        world.fleet.on_load(replica, 1, load(waiting=2, queued_prefill_tokens=queued, seen=seen))
    terms = world.decide(prompt((5, 20))).candidates
    assert all(t.queue_ms == pytest.approx(2 * (5 + 321)) for t in terms)


def test_R2_a_common_head_with_unique_tails_does_not_pile_up() -> None:
    world = World(4)
    # One after the other, each finished before the next: load alone would never spread them.
    decisions = []
    for number in range(200):
        decision = world.decide(prompt((1, 32), (2_000 + number, 10)))
        world.serve(decision, decision.predicted_cached_tokens)
        decisions.append(decision)
        world.clock.pass_s(0.05)
    counts = spread(decisions)
    assert max(counts.values()) / 50 < 1.3, counts
    warm = sum(decision.predicted_cached_tokens >= 512 for decision in decisions)
    assert warm >= 200 - 4


def test_R2_in_a_burst_too() -> None:
    world = World(4)
    counts = spread([world.decide(prompt((1, 32), (2_000 + n, 10))) for n in range(200)])
    assert max(counts.values()) / 50 < 1.3, counts


def test_R4_new_prompts_avoid_the_loaded_replica_however_small_its_index() -> None:
    world = World()
    world.join("a")
    world.join("b", held=(P,))
    busy = load(waiting=20, running=4, queued_prefill_tokens=20 * 4_000)
    world.fleet.on_load("a", 1, busy)
    assert spread([world.decide(keys) for keys in distinct(50)]) == {"b": 50}


def test_R4_what_was_sent_there_counts_before_any_report_of_it() -> None:
    world = World()
    world.join("a")
    world.join("b", held=(P,))
    for keys in distinct(20, blocks=250):
        world.decide(keys, pin="a")
    assert spread([world.decide(prompt((9_000 + n, 20))) for n in range(30)]) == {"b": 30}


def test_a_warm_prefix_wins_unless_waiting_there_costs_more() -> None:
    world = World(2)
    world.hold("r1", P)
    warm = world.decide(P)
    assert (warm.replica, warm.predicted_cached_tokens) == ("r1", 1_024)
    assert warm.candidates[0].saved_prefill_ms == pytest.approx(1_024)
    world.fleet.on_load("r1", 1, load(waiting=3, queued_prefill_tokens=3_000))
    assert world.decide(P).replica == "r0"


def test_siblings_of_a_cold_prefix_are_computed_at_once_where_nobody_else_waits() -> None:
    world = World(4)
    decisions = [world.decide(prompt((1, 128), (2 + n, 1))) for n in range(16)]
    assert spread(decisions) == dict.fromkeys(("r0", "r1", "r2", "r3"), 4)
    cold = [decision for decision in decisions if not decision.predicted_cached_tokens]
    assert spread(cold) == dict.fromkeys(("r0", "r1", "r2", "r3"), 1)


def test_siblings_of_a_cold_prefix_follow_it_on_a_busy_fleet_before_any_digest_comes() -> None:
    world = World(4)
    world.keep_busy("r0", "r1", "r2", "r3")
    first = world.decide(prompt((1, 128), (2, 1)))
    sibling = world.decide(prompt((1, 128), (3, 1)))
    assert sibling.replica == first.replica
    assert sibling.predicted_cached_tokens == 128 * 16


def test_a_cleared_cache_leaves_no_promise() -> None:
    world = World(2)
    replica = world.decide(P).replica
    world.brain.cache_cleared(replica)
    assert world.decide(P).predicted_cached_tokens == 0


def test_the_terms_shown_are_the_terms_that_decide() -> None:
    world = World(3)
    world.hold("r2", P)
    decision = world.decide(P)
    costs = {
        t.replica: t.queue_ms
        + t.prefill_ms
        + t.transfer_ms
        + t.decode_share_ms
        + t.harm_ms
        + t.eviction_ms
        + t.overload_ms
        + t.lateness_ms
        for t in decision.candidates
    }
    scores = {t.replica: t.score for t in decision.candidates}
    assert min(costs, key=costs.__getitem__) == decision.replica
    assert max(scores, key=scores.__getitem__) == decision.replica
    assert len({round(scores[r] + costs[r], 6) for r in costs}) == 1


def test_lost_trust_shrinks_the_credit() -> None:
    world = World(2)
    world.hold("r1", P)
    for _ in range(12):
        decision = world.decide(P, pin="r1")
        world.serve(decision, cached_tokens=0)
    world.brain.optimistic.forget_replica("r1")
    terms = {t.replica: t for t in world.decide(P).candidates}
    assert terms["r1"].trust < 0.1
    assert terms["r1"].saved_prefill_ms < 110
    assert [alarm.name for alarm in world.fleet.alarms] == ["false_hits"]


def test_a_replica_that_must_evict_what_is_reused_is_dearer() -> None:
    world = World(2)
    full = {"free_blocks": 0, "cached_blocks": 4_000, "prompt_tokens_total": 100}
    world.fleet.on_load("r0", 1, load(cached_tokens_total=90, **full))
    assert {world.decide(keys).replica for keys in distinct(1)} == {"r1"}


def test_R10_no_replica_is_an_answer_not_an_error() -> None:
    world = World()
    answer = world.brain.decide(world.query(P))
    assert isinstance(answer, NoReplica)
    assert answer.retry_after_s >= 1
    assert isinstance(world.brain.decide(world.query(P, pool="elsewhere")), NoReplica)


def test_R10_an_unknown_owner_in_the_index_is_ignored_and_pruned() -> None:
    world = World(1)
    pool = world.query(P).pool
    world.fleet.index.place("ghost", pool, hello().digest)
    world.fleet.index.reset("ghost", np.full(hello().digest.bits // 8, 255, np.uint8))
    assert world.decide(P).replica == "r0"
    assert "ghost" not in world.fleet.index


def test_R10_after_all_were_lost_the_first_that_returns_serves() -> None:
    world = World(2)
    for replica in ("r0", "r1"):
        world.fleet.on_gone(replica, 1, "bye")
    assert isinstance(world.brain.decide(world.query(P)), NoReplica)
    world.join("r1", boot=2)
    assert world.decide(P).replica == "r1"


def test_R11_callers_mistakes_never_open_a_breaker() -> None:
    world = World(1)
    for _ in range(20):
        world.end(world.decide(P), "refused")
    assert world.decide(P).replica == "r0"
    assert world.fleet.replicas()[0].breaker == "closed"


def test_R13_faults_in_a_row_open_it_and_the_index_stays() -> None:
    world = World()
    world.join("r0", held=(P,))
    for _ in range(3):
        world.end(world.decide(P), "timeout", replica_fault=True)
    answer = world.brain.decide(world.query(P))
    assert isinstance(answer, NoReplica)
    assert 0 < answer.retry_after_s <= 2
    world.clock.pass_s(2.0)
    trial = world.decide(P)
    assert trial.predicted_cached_tokens == 1_024
    assert isinstance(world.brain.decide(world.query(P)), NoReplica)
    world.serve(trial, 1_024)
    assert world.fleet.replicas()[0].breaker == "closed"


def test_R15_a_failed_request_leaves_no_credit_and_the_replica_suspected() -> None:
    world = World(2)
    decision = world.decide(P)
    world.brain.first_token(decision.decision_id, 0, 1_025, 1_000.0)
    world.end(decision, "transport", replica_fault=True)
    view = next(v for v in world.fleet.replicas() if v.replica == decision.replica)
    assert view.state == "suspect"
    again = world.decide(P)
    assert again.replica != decision.replica
    assert again.predicted_cached_tokens == 0
    assert world.brain.decisions.get(decision.decision_id).outcome.status == "transport"
    assert world.brain.decisions.totals["warmroute"].failed == 1


def test_excluded_and_too_long_and_pinned() -> None:
    world = World(3)
    world.hold("r0", P)
    assert world.decide(P, exclude=frozenset({"r0"})).replica != "r0"
    assert world.decide(P, pin="r2").reason == "pinned"
    too_long = world.brain.decide(world.query(P, prompt_tokens=16_384))
    assert isinstance(too_long, NoReplica)
    assert too_long.reason == "too_long"
    assert isinstance(world.brain.decide(world.query(P, pin="nobody")), NoReplica)


def test_a_deadline_that_nobody_can_keep_is_refused_with_the_time_to_wait() -> None:
    world = World(1)
    world.fleet.on_load("r0", 1, load(waiting=1, queued_prefill_tokens=9_000))
    answer = world.brain.decide(world.query(P, ttft_deadline_ms=2_000.0))
    assert isinstance(answer, NoReplica)
    assert answer.reason == "deadline"
    assert answer.retry_after_s == pytest.approx(8.0, abs=1.0)


def test_an_absurd_time_model_refuses_nobody_where_no_queue_stands() -> None:
    world = World(1)
    absurd = DecodeFit(base=0.0, per_row=9e5, per_context=700.0, confidence=0.5)
    world.fleet.on_load("r0", 1, load(running=13, running_context_tokens=1_000, decode=absurd))
    assert world.decide(P, ttft_deadline_ms=120_000.0).replica == "r0"


def test_explain_reserves_nothing_and_changes_no_turn() -> None:
    world = World(2, policy="round_robin")
    said = [world.brain.explain(world.query(P)).replica for _ in range(3)]
    assert said == ["r0", "r0", "r0"]
    assert len(world.brain.ledger) == 0
    assert [world.decide(P).replica for _ in range(3)] == ["r0", "r1", "r0"]


def test_policies_switch_while_running() -> None:
    world = World(2)
    world.brain.set_policy("round_robin")
    assert world.decide(P).policy == "round_robin"
    with pytest.raises(ValueError, match="least_load"):
        world.brain.set_policy("nonsense")
    assert world.brain.policy == "round_robin"


def test_decisions_are_bounded_told_and_joined_with_outcomes() -> None:
    world = World(2)
    decisions = [world.decide(keys, max_tokens=5) for keys in distinct(1_100, blocks=2)]
    assert world.told == decisions
    assert len(world.brain.decisions) == 1_024
    assert world.brain.decisions.get(decisions[0].decision_id) is None
    world.serve(decisions[-1], 16)
    record = world.brain.decisions.latest(1)[0]
    assert record.decision == decisions[-1]
    assert record.outcome.cached_tokens == 16
    totals = world.brain.decisions.totals["warmroute"]
    assert (totals.decisions, totals.finished, totals.cached_tokens) == (1_100, 1, 16)


class BrainLife(RuleBasedStateMachine):
    """O7: in any order of starts, ends, doubles, faults, restarts and time, nothing stays booked
    that is over, and the dispatch numbers only rise."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.boots = {f"r{number}": 1 for number in range(3)}
        self.made: list[RouteDecision] = []
        self.open: dict[str, RouteDecision] = {}

    picks = st.integers(0, 200)

    @rule(seed=st.integers(0, 5), pool_gone=st.booleans())
    def decide(self, seed: int, pool_gone: bool) -> None:
        answer = self.world.brain.decide(self.world.query(prompt((seed, 6))))
        if isinstance(answer, NoReplica):
            return
        assert not self.made or answer.dispatch_seq > self.made[-1].dispatch_seq
        self.made.append(answer)
        self.open[answer.decision_id] = answer

    @precondition(lambda self: self.made)
    @rule(pick=picks)
    def first_token(self, pick: int) -> None:
        decision = self.made[pick % len(self.made)]
        self.world.brain.first_token(decision.decision_id, 16, 97, 50.0)

    @precondition(lambda self: self.made)
    @rule(pick=picks, fault=st.booleans())
    def finish(self, pick: int, fault: bool) -> None:
        decision = self.made[pick % len(self.made)]
        outcome = Outcome("transport" if fault else "client_gone", fault)
        self.world.brain.finish(decision.decision_id, outcome)
        self.open.pop(decision.decision_id, None)

    @rule(replica=st.sampled_from(["r0", "r1", "r2"]))
    def restart(self, replica: str) -> None:
        self.boots[replica] += 1
        self.world.join(replica, boot=self.boots[replica])
        for decision in list(self.open.values()):
            if decision.replica == replica:
                del self.open[decision.decision_id]

    @rule(replica=st.sampled_from(["r0", "r1", "r2"]), pick=picks)
    def report(self, replica: str, pick: int) -> None:
        seen = {self.world.brain.router_boot: min(pick, len(self.made))}
        self.world.fleet.on_load(replica, self.boots[replica], load(seen=seen))

    @rule(seconds=st.sampled_from([0.1, 3.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.pass_s(seconds)

    @invariant()
    def booked_is_what_is_open(self) -> None:
        counts = spread(list(self.open.values()))
        for replica in self.boots:
            assert self.world.brain.ledger.booked(replica).requests == counts[replica]

    def teardown(self) -> None:
        for decision in self.made:
            self.world.end(decision, "client_gone")
        for replica in self.boots:
            assert self.world.brain.ledger.booked(replica) == Booked()
        assert len(self.world.brain.ledger) == 0


TestBrainLife = BrainLife.TestCase
TestBrainLife.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_O7_reservations_that_are_never_finished_expire() -> None:
    world = World(2)
    for keys in distinct(10):
        world.decide(keys)
    world.clock.pass_s(700.0)
    world.brain.decide(world.query(P))
    assert len(world.brain.ledger) == 1
    assert len(world.brain.optimistic) == len(P)
