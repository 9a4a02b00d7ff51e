"""How far a replica's predictions can be believed: predicted against actual cached tokens and TTFT.

Owns trust in [0, 1], which scales the credit for a match, and what deserves the alarms
`false_hits` (predicted hits don't happen), `nothing_matches` (what was surely computed there never
shows in the digest: the two ends don't speak of the same blocks) and `salt_unknown` (public heads
show there, what tenants own never does: the two ends don't derive the same salts).
"""

from __future__ import annotations

from msgspec import Struct

from router.fleet.fetches import HALF_WORTH_S, FetchRun, FetchTrust

LEARNING_RATE = 0.2
MIN_SAMPLES = 5
FALSE_HITS_BELOW = 0.5
FALSE_HITS_OVER_ABOVE = 0.7
HALF_WORTH_MS = 1e3 * HALF_WORTH_S
MISSES_FOR_ALARM = 4
MAX_TTFT_RATIO = 100.0


class Prediction(Struct, frozen=True):
    """What was said at decision time: see events.decision.RouteDecision. `fetched`: what was to
    come from below the device, in order, beyond `cached_tokens`."""

    cached_tokens: int
    ttft_ms: float
    matched_tokens: int = 0
    usable_tokens: int = 0
    fetched: tuple[FetchRun, ...] = ()


class Trust:
    """One replica, one life. Starts trusting. `nothing_matches`: again and again, blocks that must
    be resident are not in the digest."""

    def __init__(self) -> None:
        self.value = 1.0
        self.samples = 0
        self.ttft_ratio = 1.0
        self.false_hits = False
        self.fetches = FetchTrust()
        self.nothing_matches = False
        self._misses = 0
        self._private_misses = 0

    @property
    def salt_unknown(self) -> bool:
        """Again and again, only the public heads of prompts are in the digest."""
        return self._private_misses >= MISSES_FOR_ALARM

    def observe(self, predicted: Prediction, cached_tokens: int, ttft_ms: float) -> None:
        """A first token came: what had been predicted, and what the replica found cached."""
        if predicted.ttft_ms > 0:
            ratio = ttft_ms / predicted.ttft_ms
            if ratio > MAX_TTFT_RATIO:
                ratio = MAX_TTFT_RATIO
            self.ttft_ratio = (1 - LEARNING_RATE) * self.ttft_ratio + LEARNING_RATE * ratio
        if predicted.cached_tokens > 0:
            self.samples += 1
            share = cached_tokens / predicted.cached_tokens
            share = 0.0 if share < 0.0 else 1.0 if share > 1.0 else share
            worth = 0.5 ** (ttft_ms / HALF_WORTH_MS) if ttft_ms > 0 else 1.0
            rate = worth * LEARNING_RATE
            self.value = value = (1 - rate) * self.value + rate * share
            if self.false_hits:
                self.false_hits = value <= FALSE_HITS_OVER_ABOVE
            elif value < FALSE_HITS_BELOW:
                self.false_hits = self.samples >= MIN_SAMPLES

    def confirm(self, head: bool, private: bool | None) -> None:
        """Whether the digest showed a prompt's first block some time after its first token, and the
        first one behind its public head, None where it has no such."""
        self._misses = 0 if head else self._misses + 1
        self.nothing_matches = self._misses >= MISSES_FOR_ALARM
        if head and private is not None:
            self._private_misses = 0 if private else self._private_misses + 1
