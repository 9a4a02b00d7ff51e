"""Tenants in turn: nobody is kept waiting by another's many jobs, everything is bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.front.turns import Turns


def test_tenants_go_in_turn_whoever_came_with_more() -> None:
    turns: Turns[int] = Turns(threads=1, most=100)
    for number in range(20):
        turns.add("many", number)
    for number in range(3):
        turns.add("few", number)
    served = []
    while (turn := turns.next()) is not None:
        served.append(turn)
        turns.done(turn[0])
    assert served[:6] == [("many", 0), ("few", 0), ("many", 1), ("few", 1), ("many", 2), ("few", 2)]
    assert len(served) == 23


def test_one_tenant_has_never_all_threads_nor_all_places() -> None:
    turns: Turns[int] = Turns(threads=3, most=8)
    assert [turns.add("many", number) for number in range(6)] == [True] * 4 + [False] * 2
    assert [turns.next() for _ in range(3)] == [("many", 0), ("many", 1), None]
    assert turns.add("few", 0)
    assert turns.next() == ("few", 0)
    assert turns.next() is None
    turns.done("many")
    assert turns.next() == ("many", 2)


@settings(max_examples=60)
@given(
    threads=st.integers(1, 3),
    most=st.integers(1, 12),
    words=st.lists(st.sampled_from(["add a", "add b", "add c", "next", "done"]), max_size=80),
)
def test_everything_taken_in_is_served_once_in_its_order(
    threads: int, most: int, words: list[str]
) -> None:
    turns: Turns[int] = Turns(threads, most)
    taken: list[tuple[str, int]] = []
    served: list[tuple[str, int]] = []
    working: list[str] = []
    for number, word in enumerate([*words, *["done", "next"] * 200]):
        if word.startswith("add"):
            tenant = word[-1]
            if turns.add(tenant, number):
                taken.append((tenant, number))
        elif word == "next" and (turn := turns.next()) is not None:
            served.append(turn)
            working.append(turn[0])
        elif word == "done" and working:
            turns.done(working.pop(0))
        assert len(turns) == len(taken) - len(served) + len(working) <= most
        assert max(Counter(working).values(), default=0) <= max(1, threads - 1)
        assert len(working) <= threads
    for tenant in "abc":
        own = [entry for entry in served if entry[0] == tenant]
        assert own == [entry for entry in taken if entry[0] == tenant]
