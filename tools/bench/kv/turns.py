"""Two ways of doing the same, timed in turns: what disturbs the machine disturbs both."""

from __future__ import annotations

import time
from collections.abc import Callable


def in_turns(
    one: Callable[[], None], other: Callable[[], None], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of both, per round, after one round that does not count."""
    one()
    other()
    return [(timed(one), timed(other)) for _ in range(rounds)]


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
