"""Whether loads from below a device bring what digests show there: trust in each tier by itself.

A tier that falls short loses no credit on the device, and the other way round. It is asked less
often the less it is believed, so trust comes back with time too.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

LEARNING_RATE = 0.2
HALF_WORTH_S = 5.0
"""A promise that waited so long says half as much: what it was about may have been evicted."""

RECOVERY_S = 60.0
"""Half of what was lost is forgotten by then."""

SHORT_BELOW = 0.5
MIN_SAMPLES = 5
LEAST = 0.05
"""Nothing is divided by less."""


class FetchRun(Struct, frozen=True):
    """Prompt tokens `first` to `end` that were to come from tier number `tier`."""

    tier: int
    first: int
    end: int


class _Tier(Struct):
    """Trust as it was at `at_s`."""

    value: float = 1.0
    samples: int = 0
    at_s: float = 0.0


class FetchTrust:
    """One replica, one life. Starts trusting. Bounded by the number of tiers."""

    def __init__(self) -> None:
        self._tiers: dict[int, _Tier] = {}

    def observe(
        self, runs: Sequence[FetchRun], cached_tokens: int, ttft_ms: float, now_s: float
    ) -> None:
        """A first token came; `cached_tokens` were not computed. The first run that fell short
        hides those behind it, and a shortfall on the device hides all."""
        worth = 0.5 ** (max(0.0, ttft_ms) / (1e3 * HALF_WORTH_S))
        for run in runs:
            if cached_tokens < run.first:
                return
            share = min(1.0, (cached_tokens - run.first) / (run.end - run.first))
            seen = self._tiers.setdefault(run.tier, _Tier())
            before = self.value(run.tier, now_s)
            seen.value = before + worth * LEARNING_RATE * (share - before)
            seen.at_s, seen.samples = now_s, seen.samples + 1

    def value(self, tier: int, now_s: float) -> float:
        """How much of what is shown there can be counted on, `LEAST` to 1."""
        seen = self._tiers.get(tier)
        if seen is None:
            return 1.0
        lost = (1.0 - seen.value) * 0.5 ** (max(0.0, now_s - seen.at_s) / RECOVERY_S)
        return max(LEAST, 1.0 - lost)

    def short(self, now_s: float) -> list[int]:
        """Tiers that deserve an alarm."""
        return [
            tier
            for tier, seen in self._tiers.items()
            if seen.samples >= MIN_SAMPLES and self.value(tier, now_s) < SHORT_BELOW
        ]
