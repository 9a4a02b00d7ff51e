"""Orders of service: who goes first, who never starves, who is told early that it is too late."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from replica.sched.order import Policy, Rank, Task
from replica.sched.plan import ChildId
from replica.sched.policies import POLICIES
from replica.sched.policies.deadline import MAX_TURNS, Deadline
from tests.replica.sched.rig import Bench, sampling, tokens_of
from tests.replica.sched.test_timing import trained

ONE = Task(
    child=ChildId(1),
    tenant="t",
    priority=0,
    weight=1.0,
    arrival_s=100.0,
    first_by_s=None,
    hit_tokens=0,
    uncached_tokens=100,
    prefill_ms=50.0,
    decode_ms=10.0,
    error=0.2,
)


class Queue:
    """Waiting requests under one policy, without an engine: whoever is first is served, at once."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ranks: dict[ChildId, Rank] = {}
        self.tasks: dict[ChildId, Task] = {}
        self.late: list[int] = []
        self._children = 0

    def add(self, **fields: object) -> int:
        self._children += 1
        task = replace(ONE, child=ChildId(self._children), **fields)
        self.tasks[task.child] = task
        self.ranks[task.child] = self.policy.enter(task)
        return task.child

    def pop(self, now_s: float) -> Task:
        while turns := self.policy.advance(now_s):
            for turn in turns:
                if turn.rank is None:
                    self.late.append(turn.child)
                    del self.ranks[turn.child]
                else:
                    self.ranks[turn.child] = turn.rank
        child = min(self.ranks, key=self.ranks.__getitem__)
        self.policy.started(self.ranks.pop(child))
        self.policy.left(child)
        return self.tasks[child]

    def order(self, now_s: float = 100.0) -> list[int]:
        return [self.pop(now_s).child for _ in range(len(self.ranks))]


@pytest.mark.parametrize(
    ("name", "expected"), [("fcfs", [1, 2, 3]), ("priority", [2, 1, 3]), ("deadline", [2, 3, 1])]
)
def test_what_each_order_looks_at(name: str, expected: list[int]) -> None:
    queue = Queue(POLICIES[name]())
    queue.add(arrival_s=100.0, uncached_tokens=9_000)
    queue.add(arrival_s=100.1, priority=1)
    queue.add(arrival_s=100.2)
    assert queue.order() == expected


@pytest.mark.parametrize("name", POLICIES)
def test_among_equals_the_longest_cached_prefix_goes_first_and_only_there(name: str) -> None:
    queue = Queue(POLICIES[name]())
    queue.add(tenant="a", hit_tokens=16)
    queue.add(tenant="b", hit_tokens=64)
    assert queue.order() == [2, 1]
    queue = Queue(POLICIES[name]())
    queue.add(priority=1, arrival_s=100.0, first_by_s=100.1)
    queue.add(arrival_s=101.0, hit_tokens=4_096)
    assert queue.order() == [1, 2]


def test_a_near_deadline_goes_first_and_a_vague_estimate_starts_earlier() -> None:
    queue = Queue(Deadline())
    queue.add(uncached_tokens=1_000)
    queue.add(uncached_tokens=1_000, first_by_s=100.8, arrival_s=100.05)
    assert queue.order(100.05) == [2, 1]
    queue = Queue(Deadline())
    # 400 ms of work, due in 1.5 s: there is a second to spare, unless it may take twice as long.
    queue.add(tenant="a", uncached_tokens=1_000, prefill_ms=400.0, first_by_s=101.5, error=0.1)
    queue.add(tenant="b", uncached_tokens=1_000, prefill_ms=400.0, first_by_s=101.5, error=1.0)
    assert queue.order() == [2, 1]


def test_nothing_learnt_yet_means_size_and_age() -> None:
    queue = Queue(Deadline())
    queue.add(uncached_tokens=9_000, first_by_s=100.01, error=None)
    queue.add(arrival_s=100.2, uncached_tokens=200, first_by_s=900.0, error=None)
    assert queue.order(100.2) == [2, 1]


def test_a_long_prompt_gets_its_turn_beside_a_stream_of_short_ones() -> None:
    queue = Queue(Deadline())
    long = queue.add(tenant="long", uncached_tokens=30_000, prefill_ms=3_000.0)
    now_s, served = 100.0, []
    while long not in served and now_s < 200.0:
        queue.add(tenant="short", arrival_s=now_s, uncached_tokens=200)
        queue.add(tenant="short", arrival_s=now_s, uncached_tokens=200)
        served.append(queue.pop(now_s).child)
        now_s += 0.1
    assert long in served
    assert now_s > 100.0 + 20.0, "it had patience"


def test_S6_a_flood_is_urgent_only_in_its_turn() -> None:
    queue = Queue(Deadline())
    for _ in range(200):
        queue.add(tenant="flood")
    served = [queue.pop(105.0).tenant for _ in range(20)]
    quiet = queue.add(tenant="quiet", arrival_s=104.0)
    served = [queue.pop(106.0).child for _ in range(3)]
    assert quiet in served


def test_shares_of_backlogged_tenants_are_even_in_work_not_in_requests() -> None:
    queue = Queue(Deadline())
    for _ in range(400):
        queue.add(tenant="large", prefill_ms=290.0)
        queue.add(tenant="small", prefill_ms=20.0)
    work = {"large": 0.0, "small": 0.0}
    while queue.ranks and min(work.values()) < 6_000.0:
        task = queue.pop(200.0)
        work[task.tenant] += task.prefill_ms + task.decode_ms
    assert max(work.values()) < 1.2 * min(work.values())


def test_shares_of_backlogged_tenants_follow_their_weights() -> None:
    queue = Queue(Deadline())
    for _ in range(400):
        queue.add(tenant="third", prefill_ms=140.0, weight=0.5)
        queue.add(tenant="two thirds", prefill_ms=90.0)
    work = {"third": 0.0, "two thirds": 0.0}
    while queue.ranks and min(work.values()) < 6_000.0:
        task = queue.pop(200.0)
        work[task.tenant] += task.prefill_ms + task.decode_ms
    assert work["two thirds"] / work["third"] == pytest.approx(2.0, rel=0.1)


def test_what_is_too_late_is_told_so_when_it_can_not_make_it_any_more() -> None:
    queue = Queue(Deadline())
    late = queue.add(prefill_ms=500.0, first_by_s=101.0, error=0.25)
    queue.add(prefill_ms=500.0)
    # 500 ms may take 400: until 100.6 it may still be in time.
    assert queue.pop(100.59).child == late
    queue.add(prefill_ms=500.0, first_by_s=101.0, error=0.25)
    queue.pop(100.61)
    assert queue.late == [3]


def test_only_a_queue_refuses_at_intake_and_a_refusal_costs_the_tenant_nothing() -> None:
    policy = Deadline()
    task = replace(ONE, prefill_ms=500.0, first_by_s=101.0, error=0.25)
    policy.enter(task)
    assert not policy.refuses(replace(task, first_by_s=100.1), 0.0)
    assert not policy.refuses(task, 700.0)
    before = policy.enter(replace(task, child=ChildId(2)))
    assert policy.refuses(replace(task, child=ChildId(2)), 800.0)
    again = policy.enter(replace(task, child=ChildId(3)))
    assert again[2] == before[2], "the next one stands where the refused one stood"


def test_nobody_saves_up_turns_by_staying_away() -> None:
    policy = Deadline()
    for child in range(20):
        last = policy.enter(replace(ONE, child=ChildId(child)))
        policy.started(last)
    late = policy.enter(replace(ONE, child=ChildId(20), tenant="late"))
    assert late[2] == last[2] > 0.0


def test_who_leaves_unserved_costs_its_tenant_nothing() -> None:
    """A client that gives up and asks again, over and over, is not put behind everybody else."""
    policy = Deadline()
    policy.enter(replace(ONE, tenant="other"))
    before = policy.enter(replace(ONE, child=ChildId(2)))
    for child in range(3, 50):
        policy.enter(replace(ONE, child=ChildId(child)))
        policy.left(ChildId(child))
    policy.left(ChildId(2))
    policy.left(ChildId(2))
    again = policy.enter(replace(ONE, child=ChildId(50)))
    assert again[2] == before[2]
    policy.started(again)
    policy.left(ChildId(50))
    assert policy.enter(replace(ONE, child=ChildId(51)))[2] > again[2], "who was served has cost"


def test_a_flood_that_was_given_up_leaves_its_tenant_where_it_was() -> None:
    bench = Bench(max_running=1, policy=Deadline())
    bench.add(tokens_of(0, 9), sampling(30), tenant="other")
    bench.step()
    for child in [bench.add(tokens_of(1, 9), tenant="flood") for _ in range(200)]:
        bench.scheduler.lifecycle.abort(child)
    bench.step()
    assert bench.scheduler.service._policy._ends_ms["flood"] == pytest.approx(0.0, abs=1e-6)


def test_events_of_those_who_left_are_forgotten() -> None:
    policy = Deadline()
    for child in range(1_000):
        policy.enter(replace(ONE, child=ChildId(child), first_by_s=9_000.0))
    assert policy.events == 1_000
    for child in range(1, 1_000):
        policy.left(ChildId(child))
        policy.left(ChildId(child))
    assert policy.events == 1
    policy.left(ChildId(0))
    assert not policy.advance(1e9)
    for child in range(3_000):
        policy.enter(replace(ONE, child=ChildId(child), tenant=f"t{child}"))
    assert policy.tenants <= 1_024


def test_so_many_turns_and_no_more_in_one_step() -> None:
    queue = Queue(Deadline())
    for _ in range(3 * MAX_TURNS):
        queue.add()
    assert len(queue.policy.advance(500.0)) == MAX_TURNS


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_order_loses_anybody_or_changes_a_token(name: str, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(24, 4, max_step_tokens=12, policy=POLICIES[name](), horizon_tokens=2)
    for index in range(30):
        prompt = (*tokens_of(index % 3, 8), *tokens_of(index, rng.randint(1, 20)))
        bench.add(
            prompt,
            sampling(rng.randint(1, 6)),
            tenant=rng.choice("abc"),
            priority=rng.randint(-1, 1),
            arrival_s=bench.now_s,
        )
        if rng.random() < 0.5:
            bench.step()
    bench.run()
    bench.assert_right()
    bench.assert_empty()


def late_bench() -> Bench:
    """A replica that has learnt its speed: 40 tokens of prefill take some 40 ms."""
    bench = Bench(64, 4, max_running=1, policy=Deadline())
    bench.scheduler.timing = bench.scheduler.service._timing = trained(200)
    return bench


@pytest.mark.parametrize("due_s", [1.001, 1.07])
def test_an_early_refusal_reaches_the_client_with_its_way_out(due_s: float) -> None:
    bench = late_bench()
    first = bench.add(tokens_of(1, 40), arrival_s=1.0)
    bench.step()
    ahead = bench.add(tokens_of(2, 80), arrival_s=1.0, first_by_s=1.1)
    late = bench.add(tokens_of(3, 40), arrival_s=1.0, first_by_s=due_s)
    bench.scheduler.plan(1.002)
    bench.collect()
    error = bench.outputs[late][-1].error
    assert error is not None
    assert (error.status, error.code, error.reroute) == (429, "deadline", True)
    assert error.retry_after_s is not None
    assert first, ahead


def test_alone_even_the_late_are_served() -> None:
    bench = late_bench()
    child = bench.add(tokens_of(1, 40), arrival_s=1.0, first_by_s=1.001)
    bench.run()
    bench.assert_right(child)
    bench.assert_empty()


def test_a_shadow_is_counted_and_decides_nothing() -> None:
    outcomes = []
    for shadow in (None, Deadline()):
        bench = Bench(max_running=1, max_step_tokens=64, policy=POLICIES["fcfs"](), shadow=shadow)
        bench.add(tokens_of(1, 30), priority=0)
        bench.add(tokens_of(2, 3), priority=5)
        bench.add(tokens_of(3, 3), priority=9)
        plans = [bench.step() for _ in range(12)]
        outcomes.append([[row.child for row in plan.rows] for plan in plans if plan])
        bench.run()
    assert outcomes[0] == outcomes[1]
    counts = bench.scheduler.service.shadow_counts()
    assert counts is not None
    assert (counts.started, counts.differed, counts.overtaken) == (3, 2, 3)
