"""The bisection, over times that are known."""

from __future__ import annotations

import pytest

from tools.sim.capacity import LEAST_LOAD, MOST_LOAD, PRECISION, Capacity, capacity


def found_for(border: float) -> Capacity:
    return capacity(lambda load: load if load <= border else None)


@pytest.mark.parametrize("border", [0.13, 0.2, 0.99, 1.0, 1.7, 9.0, 15.9])
def test_the_border_is_found(border: float) -> None:
    found = found_for(border)
    assert border / (1 + PRECISION) <= found.load <= border
    assert len(found.curve) <= 12
    assert list(found.curve) == sorted(found.curve, key=lambda tried: tried[0])


def test_a_border_near_the_guess_takes_few_runs() -> None:
    assert len(found_for(1.2).curve) <= 5


def test_what_never_holds_has_no_capacity() -> None:
    found = found_for(0.0)
    assert found.load == 0
    assert found.curve[0] == (LEAST_LOAD, None)


def test_what_always_holds_has_all_that_was_tried() -> None:
    assert found_for(99.0).load == MOST_LOAD
