"""Second use enters; memory is bounded; what is not used any more is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.doorkeeper import Doorkeeper


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_the_second_use_enters() -> None:
    door = Doorkeeper(1_000)
    assert [door.touch(key(1)) for _ in range(3)] == [False, True, True]
    assert not door.touch(key(2))


def test_one_time_keys_stay_out() -> None:
    door = Doorkeeper(10_000)
    entered = sum(door.touch(key(number)) for number in range(5_000))
    assert entered < 100, "false positives of two filters at 1 %"


def test_it_forgets_after_two_generations_but_not_what_is_used() -> None:
    clock = Clock()
    door = Doorkeeper(1_000, generation_s=10.0, clock=clock)
    door.touch(key(1))
    door.touch(key(2))
    for _ in range(4):
        clock.now += 10.0
        assert door.touch(key(1))
    assert not door.touch(key(2))


@given(st.integers(1, 50), st.lists(st.integers(0, 300), max_size=400))
def test_it_never_forgets_the_last_generation(capacity: int, uses: list[int]) -> None:
    """A key used within the last `capacity` different ones is known, however full it is."""
    door = Doorkeeper(capacity)
    last: dict[int, int] = {}
    for at, number in enumerate(uses):
        since = uses[last[number] + 1 : at] if number in last else None
        known = door.touch(key(number))
        assert known or since is None or len(set(since)) >= capacity
        last[number] = at
