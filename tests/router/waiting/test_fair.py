"""Deficit round robin by itself: shares, order, and what it forgets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.waiting.fair import MAX_OWED_TOKENS, QUANTUM_TOKENS, Entry, FairQueue


def entry(tenant: str, cost: float = 100.0, weight: float = 1.0, priority: int = 0) -> Entry:
    return Entry(tenant, weight, priority, 1, lambda: cost)


def drained(queue: FairQueue) -> list[Entry]:
    entries = []
    while queue:
        entries.append(queue.pop())
    return entries


@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    costs=st.lists(st.integers(0, 5_000), min_size=5, max_size=5),
    served=st.integers(1, 60),
)
def test_S6_backlogged_tenants_get_work_by_their_weights(
    weights: list[float], costs: list[int], served: int
) -> None:
    queue = FairQueue()
    for number, weight in enumerate(weights):
        for _ in range(served):
            queue.add(entry(str(number), costs[number], weight))
    got: Counter[str] = Counter()
    for _ in range(served):
        one = queue.pop()
        got[one.tenant] += max(1, one.price())
    shares = [got[str(number)] / weight for number, weight in enumerate(weights)]
    allowed = max(max(1, cost) / weight for cost, weight in zip(costs, weights, strict=False))
    assert max(shares) - min(shares) <= allowed + 2 * QUANTUM_TOKENS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3_000)), max_size=40))
def test_within_a_tenant_first_come_is_first_served(asked: list[tuple[str, int]]) -> None:
    queue = FairQueue()
    entries = [entry(tenant, cost) for tenant, cost in asked]
    for one in entries:
        queue.add(one)
    out = drained(queue)
    assert len(out) == len(entries)
    for tenant in "abc":
        assert [one for one in out if one.tenant == tenant] == [
            one for one in entries if one.tenant == tenant
        ]


def test_what_was_computed_elsewhere_goes_off_a_tenants_turns_and_is_forgiven_in_the_end() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.add(entry("a", QUANTUM_TOKENS))
        queue.add(entry("b", QUANTUM_TOKENS))
    queue.charge("a", 10 * QUANTUM_TOKENS)
    queue.charge("nobody", 10.0)
    assert Counter(queue.pop().tenant for _ in range(12))["b"] in (11, 12)
    for _ in range(100):
        queue.charge("a", 1_000 * QUANTUM_TOKENS)
    order = [queue.pop().tenant for _ in range(200)]
    assert order.index("a") * QUANTUM_TOKENS <= MAX_OWED_TOKENS + 2 * QUANTUM_TOKENS


def test_priority_goes_before_any_share() -> None:
    queue = FairQueue()
    low, high = entry("a", weight=100.0), entry("b", cost=9_000.0, priority=1)
    queue.add(low)
    queue.add(high)
    assert drained(queue) == [high, low]


def test_S6_who_has_asked_for_nothing_lately_goes_at_once() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(entry("flood", cost=4_000.0))
    queue.pop()
    polite = entry("polite", cost=4_000.0)
    queue.add(polite)
    assert queue.pop() is polite


def test_S6_coming_again_and_again_with_little_brings_no_more_than_a_share() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(entry("flood", cost=4_000.0))
    served: Counter[str] = Counter()
    queue.add(entry("sly", cost=4_000.0))
    for _ in range(40):
        tenant = queue.pop().tenant
        served[tenant] += 1
        if tenant == "sly":
            queue.add(entry("sly", cost=4_000.0))
    assert served["sly"] <= served["flood"] + 1


def test_who_leaves_is_forgotten() -> None:
    queue = FairQueue()
    entries = [entry("a", 5_000.0), entry("a", 10.0), entry("b", 10.0)]
    for one in entries:
        queue.add(one)
    assert queue.remove(entries[0])
    assert not queue.remove(entries[0])
    assert set(drained(queue)) == set(entries[1:])
    with pytest.raises(KeyError):
        queue.pop()


def test_a_request_is_priced_once_when_it_goes() -> None:
    asked: list[str] = []

    def priced(name: str) -> Entry:
        def price() -> float:
            asked.append(name)
            return 9_000.0

        return Entry(name[0], 1.0, 0, 1, price)

    queue = FairQueue()
    for name in ("a1", "a2", "b1"):
        queue.add(priced(name))
    queue.pop()
    assert asked == ["b1"]
    drained(queue)
    assert sorted(asked) == ["a1", "a2", "b1"]
