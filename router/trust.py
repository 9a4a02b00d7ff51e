"""How far a replica's predictions can be believed: predicted against actual cached tokens and TTFT.

Owns trust in [0, 1], which scales the credit for a match, and what deserves the alarms
`false_hits` (predicted hits don't happen) and `nothing_matches` (hits happen, but the digest never
knows of them: the two ends don't speak of the same blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

LEARNING_RATE = 0.2
MIN_SAMPLES = 5
FALSE_HITS_BELOW = 0.5
FALSE_HITS_OVER_ABOVE = 0.7
UNSEEN_HITS_FOR_ALARM = 4
UNSEEN_HIT_SPACING_S = 0.5
"""Siblings of one burst hit before any digest can know: they count once."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was said at decision time. `digest_tokens` leaves out the optimistic entries; None when
    the digest was unknown."""

    digest_tokens: int | None
    cached_tokens: int
    ttft_ms: float


class Trust:
    """One replica, one life. Starts trusting."""

    def __init__(self) -> None:
        self.value = 1.0
        self.samples = 0
        self.ttft_ratio = 1.0
        self.false_hits = False
        self._unseen_hits = 0
        self._unseen_hit_s = float("-inf")

    @property
    def nothing_matches(self) -> bool:
        """The cache hits again and again, and never where the digest says so."""
        return self._unseen_hits >= UNSEEN_HITS_FOR_ALARM

    def observe(
        self, predicted: Prediction, cached_tokens: int, ttft_ms: float, now_s: float
    ) -> None:
        """A first token came: what had been predicted, and what the replica found cached."""
        if predicted.ttft_ms > 0:
            self.ttft_ratio = _blend(self.ttft_ratio, min(ttft_ms / predicted.ttft_ms, 100.0))
        if cached_tokens > 0:
            self._match(predicted.digest_tokens, now_s)
        if predicted.cached_tokens > 0:
            self.samples += 1
            share = min(1.0, max(0, cached_tokens) / predicted.cached_tokens)
            self.value = _blend(self.value, share)
            self._judge()

    def _match(self, digest_tokens: int | None, now_s: float) -> None:
        if digest_tokens:
            self._unseen_hits = 0
        elif digest_tokens == 0 and now_s - self._unseen_hit_s >= UNSEEN_HIT_SPACING_S:
            self._unseen_hits += 1
            self._unseen_hit_s = now_s

    def _judge(self) -> None:
        if self.samples >= MIN_SAMPLES and self.value < FALSE_HITS_BELOW:
            self.false_hits = True
        elif self.value > FALSE_HITS_OVER_ABOVE:
            self.false_hits = False


def _blend(old: float, new: float) -> float:
    return (1 - LEARNING_RATE) * old + LEARNING_RATE * new
