"""Deficit round robin by itself: shares, order, and what it forgets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.waiting.fair import MAX_OWED_TOKENS, QUANTUM_TOKENS, Entry, FairQueue, anything


def entry(tenant: str, cost: float = 100.0, weight: float = 1.0, priority: int = 0) -> Entry:
    return Entry(tenant, weight, priority, 1, lambda: cost, cost)


def drained(queue: FairQueue) -> list[Entry]:
    entries = []
    while (one := queue.pop()) is not None:
        entries.append(one)
    assert not queue
    return entries


def next_of(queue: FairQueue) -> Entry:
    one = queue.pop()
    assert one is not None
    return one


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
        one = next_of(queue)
        got[one.tenant] += max(1, one.price())
    shares = [got[str(number)] / weight for number, weight in enumerate(weights)]
    allowed = max(max(1, cost) / weight for cost, weight in zip(costs, weights, strict=False))
    assert max(shares) - min(shares) <= allowed + 2 * QUANTUM_TOKENS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3_000)), max_size=40))
def test_O4_of_a_tenants_prompts_of_one_size_the_first_come_is_served_first(
    asked: list[tuple[str, int]],
) -> None:
    queue = FairQueue()
    entries = [entry(tenant, cost) for tenant, cost in asked]
    for one in entries:
        queue.add(one)
    out = drained(queue)
    assert len(out) == len(entries)
    for flow in {(one.tenant, one.size) for one in entries}:
        assert [one for one in out if (one.tenant, one.size) == flow] == [
            one for one in entries if (one.tenant, one.size) == flow
        ]


SHORT_TOKENS, LONG_TOKENS = 100.0, 8_000.0
SHORT = entry("", SHORT_TOKENS).size


def only_short(size: int) -> bool:
    return size <= SHORT


def test_S6_behind_a_long_prompt_that_waits_for_room_a_short_one_goes() -> None:
    queue = FairQueue()
    longs = [entry(tenant, LONG_TOKENS) for tenant in "ab" for _ in range(3)]
    shorts = [entry(tenant, SHORT_TOKENS) for tenant in "ac"]
    for one in longs + shorts:
        queue.add(one)
    assert {queue.pop(only_short), queue.pop(only_short)} == set(shorts)
    assert queue.pop(only_short) is None
    assert set(drained(queue)) == set(longs)


def test_a_long_prompt_of_higher_priority_is_not_passed() -> None:
    queue = FairQueue()
    queue.add(entry("a", SHORT_TOKENS))
    queue.add(entry("b", LONG_TOKENS, priority=1))
    assert queue.pop(only_short) is None


def again(queue: FairQueue, room_for_all: bool) -> Entry | None:
    """Let one go, and another like it come."""
    one = queue.pop(anything if room_for_all else only_short)
    if one is not None:
        queue.add(entry(one.tenant, one.price(), one.weight))
    return one


@settings(max_examples=20)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    room=st.lists(st.booleans(), min_size=5, max_size=30),
)
def test_S6_passing_brings_nobody_more_than_its_share(
    weights: list[float], room: list[bool]
) -> None:
    """Whenever there is room for all, and whenever for short ones only."""
    queue = FairQueue()
    kinds = {"long": (LONG_TOKENS,), "short": (SHORT_TOKENS,), "both": (SHORT_TOKENS, LONG_TOKENS)}
    weight_of = dict(zip(kinds, weights, strict=True))
    for tenant, costs in kinds.items():
        for cost in costs:
            queue.add(entry(tenant, cost, weight_of[tenant]))
    got = dict.fromkeys(kinds, 0.0)
    for for_all in room:
        for _ in range(20):
            one = again(queue, for_all)
            if one is None:
                break
            got[one.tenant] += one.price() / one.weight
    allowed = LONG_TOKENS / min(weights) + 2 * QUANTUM_TOKENS
    assert max(got.values()) - min(got.values()) <= allowed


@settings(max_examples=20)
@given(
    shorts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900)), min_size=1, max_size=6),
    room=st.lists(st.booleans(), max_size=60),
)
def test_S6_no_flood_of_short_prompts_starves_a_long_one(
    shorts: list[tuple[str, int]], room: list[bool]
) -> None:
    """However much has passed it, it goes after its share of what there is room for."""
    queue = FairQueue()
    for tenant, tokens in [*shorts, ("a", LONG_TOKENS)]:
        queue.add(entry(tenant, tokens))
    long = entry("a", LONG_TOKENS)
    queue.add(long)
    for for_all in room:
        if again(queue, for_all) is long:
            return
    passed, flows = 0.0, len(set(shorts)) + 2
    while (one := again(queue, True)) is not long:
        assert one is not None
        passed += max(1.0, one.price())
        assert passed <= 2 * flows * (LONG_TOKENS + 2 * QUANTUM_TOKENS)


def test_what_was_computed_elsewhere_goes_off_a_tenants_turns_and_is_forgiven_in_the_end() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.add(entry("a", QUANTUM_TOKENS))
        queue.add(entry("b", QUANTUM_TOKENS))
    queue.charge("a", 10 * QUANTUM_TOKENS)
    queue.charge("nobody", 10.0)
    assert Counter(next_of(queue).tenant for _ in range(12))["b"] in (11, 12)
    for _ in range(100):
        queue.charge("a", 1_000 * QUANTUM_TOKENS)
    order = [next_of(queue).tenant for _ in range(200)]
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
        tenant = next_of(queue).tenant
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
    assert queue.pop() is None


def test_a_request_is_priced_once_when_it_goes() -> None:
    asked: list[str] = []

    def priced(name: str) -> Entry:
        def price() -> float:
            asked.append(name)
            return 9_000.0

        return Entry(name[0], 1.0, 0, 1, price, 9_000.0)

    queue = FairQueue()
    for name in ("a1", "a2", "b1"):
        queue.add(priced(name))
    queue.pop()
    assert asked == ["b1"]
    drained(queue)
    assert sorted(asked) == ["a1", "a2", "b1"]
