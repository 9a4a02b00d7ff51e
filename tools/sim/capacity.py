"""The highest load at which the 90th percentile of the TTFT still holds, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

P90TtftS = Callable[[float], float | None]
"""At a load; None where it breaks the objective."""

LEAST_LOAD = 0.125
MOST_LOAD = 16.0
PRECISION = 0.03
STRIDE = 1.25
"""The first step away from the guess; each one after it is the square of the one before."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """`load` is 0 where even the least one breaks the objective, and at most `MOST_LOAD`; `curve`
    has the loads that were tried and the p90 TTFT there, in s."""

    load: float
    curve: tuple[tuple[float, float | None], ...]


def capacity(p90_ttft_s: P90TtftS, guess: float = 1.0) -> Capacity:
    """Strides away from the guess until the border lies between two loads, then halves their ratio
    until they are within `PRECISION`. Where p90 falls again with load, it is one border of
    several."""
    curve: dict[float, float | None] = {}

    def holds(load: float) -> bool:
        curve[load] = p90_ttft_s(load)
        return curve[load] is not None

    low, high = _bracket(holds, guess)
    while low and high / low > 1 + PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Capacity(low, tuple(sorted(curve.items(), key=lambda tried: tried[0])))


def _bracket(holds: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """A load that holds and the next that does not; equal at the upper end, 0 at the lower."""
    load, stride, up = guess, STRIDE, holds(guess)
    while LEAST_LOAD < load < MOST_LOAD:
        last, load = load, min(MOST_LOAD, load * stride) if up else max(LEAST_LOAD, load / stride)
        stride *= stride
        if holds(load) is not up:
            return (last, load) if up else (load, last)
    return (load, load) if up else (0.0, load)
