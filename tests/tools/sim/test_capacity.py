"""The bisection, over times that are known."""

from __future__ import annotations

import pytest

from tools.sim.capacity import LEAST_LOAD, MOST_LOAD, PRECISION, capacity


@pytest.mark.parametrize("border", [0.2, 0.99, 1.0, 1.7, 9.0])
def test_the_border_is_found(border: float) -> None:
    found = capacity(lambda load: load, border)
    assert border / (1 + PRECISION) <= found.load <= border
    assert len(found.curve) <= 14
    assert list(found.curve) == sorted(found.curve)


def test_what_never_holds_has_no_capacity() -> None:
    found = capacity(lambda load: 9.0, 1.0)
    assert found.load == 0
    assert min(found.curve)[0] == LEAST_LOAD


def test_what_always_holds_has_all_that_was_tried() -> None:
    assert capacity(lambda load: 0.1, 1.0).load == MOST_LOAD
