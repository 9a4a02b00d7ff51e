"""The highest load at which the 90th percentile of the TTFT still holds, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

P90TtftS = Callable[[float], float]

LEAST_LOAD = 0.125
MOST_LOAD = 16.0
PRECISION = 0.03


@dataclass(frozen=True, slots=True)
class Capacity:
    """`load` is 0 where even the least one breaks the objective, and at most `MOST_LOAD`; `curve`
    has the loads that were tried and the p90 TTFT there, in s."""

    load: float
    curve: tuple[tuple[float, float], ...]


def capacity(p90_ttft_s: P90TtftS, slo_s: float, guess: float = 1.0) -> Capacity:
    """Doubles or halves from the guess until the border lies between two loads, then halves their
    ratio until they are within `PRECISION`. Where p90 falls again with load, it is one border of
    several."""
    curve: dict[float, float] = {}

    def holds(load: float) -> bool:
        curve[load] = p90_ttft_s(load)
        return curve[load] <= slo_s

    low, high = _bracket(holds, guess)
    while low and high / low > 1 + PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Capacity(low, tuple(sorted(curve.items())))


def _bracket(holds: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """A load that holds and the next that does not; equal at the upper end, 0 at the lower."""
    load = guess
    if not holds(load):
        while load > LEAST_LOAD:
            load /= 2
            if holds(load):
                return load, 2 * load
        return 0.0, load
    while load < MOST_LOAD:
        load *= 2
        if not holds(load):
            return load / 2, load
    return load, load
