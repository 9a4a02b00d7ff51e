"""How often a digest claims a block that nobody holds: measured, beside what its replica states.

Keys drawn at random are held by nobody. A few are asked at a time, so that it costs next to nothing
in one go, and what was found fades as more is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from router.locality.index import DigestIndex

PROBES = 64
WINDOW_PROBES = 1 << 15


class FalseHits:
    """Probes and false hits by replica."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._rng = rng or np.random.default_rng()
        self._found: dict[str, tuple[float, float]] = {}

    def probe(self, index: DigestIndex) -> None:
        """Ask every known digest for `PROBES` keys."""
        halves = self._rng.integers(0, 1 << 64, (PROBES, 2), np.uint64)
        found = index.claimed(halves)
        for replica in self._found.keys() - found.keys():
            del self._found[replica]
        for replica, hits in found.items():
            probes, before = self._found.get(replica, (0.0, 0.0))
            fade = 0.5 if probes >= WINDOW_PROBES else 1.0
            self._found[replica] = (fade * probes + PROBES, fade * before + hits)

    def forget(self, replica: str) -> None:
        """Its digest is another one now."""
        self._found.pop(replica, None)

    def rates(self) -> Iterator[tuple[str, float]]:
        """All that were measured."""
        for replica, (probes, hits) in self._found.items():
            yield replica, hits / probes

    def rate(self, replica: str) -> float | None:
        """Per key asked; None before the first probe."""
        if replica not in self._found:
            return None
        probes, hits = self._found[replica]
        return hits / probes
