"""Where to get a run of blocks from: the tiers in their order, and computing them as the last one.

A run is brought in only where that is clearly faster than computing it, by rates measured here. The
tiers may have holes; what is used is always a prefix of what was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.level import Level

MARGIN = 0.7
"""Bringing in may take at most this share of computing: estimates err, and a load can come late."""

MAX_RUNS = 8
"""Of one request: a chain in more pieces is not worth asking on."""

RecomputeMs = Callable[[int], float]
"""How long computing the next n blocks would take, in ms; grows with n."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks first to first + count - 1 of a chain are at one level."""

    level: Level
    first: int
    count: int


class Cascade:
    """The levels, nearest first. Called from helper threads, never from the engine's loop."""

    def __init__(
        self,
        levels: Sequence[Level],
        margin: float = MARGIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.levels = tuple(levels)
        self._margin = margin
        self._clock = clock

    @property
    def usable(self) -> bool:
        """Whether any level can be asked now."""
        return any(level.usable for level in self.levels)

    def plan(
        self, chain: Sequence[bytes], first: int, recompute_ms: RecomputeMs, deadline: float
    ) -> tuple[Run, ...]:
        """Runs from block `first` of the chain on, without a gap, as far as bringing them in pays.

        `recompute_ms` counts from block `first`; the runs' numbers are those in the chain.
        """
        return self._paying(self._find(chain, first, deadline), first, recompute_ms)

    def pays(self, blocks: int, recompute_ms: RecomputeMs) -> bool:
        """Whether so many blocks could pay at all, were they at the fastest level."""
        levels = [level for level in self.levels if level.usable]
        fastest = min((level.fetch_ms(blocks) for level in levels), default=float("inf"))
        return fastest <= self._margin * recompute_ms(blocks)

    def _find(self, chain: Sequence[bytes], first: int, deadline: float) -> list[Run]:
        runs: list[Run] = []
        at = first
        while at < len(chain) and len(runs) < MAX_RUNS and self._clock() < deadline:
            run = self._first_holder(chain, at, deadline)
            if run is None:
                break
            runs.append(run)
            at += run.count
        return runs

    def _first_holder(self, chain: Sequence[bytes], at: int, deadline: float) -> Run | None:
        for level in self.levels:
            count = level.holds(chain, at, deadline)
            if count:
                return Run(level, at, count)
        return None

    def _paying(
        self, runs: Sequence[Run], first: int, recompute_ms: RecomputeMs
    ) -> tuple[Run, ...]:
        """The runs up to where the sum of what each saves is largest; none may save nothing."""
        best = saved = 0.0
        keep = 0
        for place, run in enumerate(runs):
            start = run.first - first
            computing = recompute_ms(start + run.count) - recompute_ms(start)
            saved += self._margin * computing - run.level.fetch_ms(run.count)
            if saved > best:
                best, keep = saved, place + 1
        return tuple(runs[:keep])
