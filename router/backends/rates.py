"""How fast a server of another kind is, learnt from what the router sees of it.

A first byte that came while no other prefill was under way tells the prefill, the rest of the
answer the decode.
"""

from __future__ import annotations

from events.load import DecodeFit, PrefillFit

FORGETTING = 0.97
HALF_CONFIDENT_SAMPLES = 5.0
MIN_SPREAD = 1e-3
"""Relative variance of x below which samples say nothing about a slope."""

MIN_DECODE_TOKENS = 4


class LineFit:
    """y = base + slope * x, both at least 0, by least squares; older samples fade."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0

    @property
    def confidence(self) -> float:
        """From 0 without a sample towards 1."""
        return self._weight / (self._weight + HALF_CONFIDENT_SAMPLES)

    def add(self, x: float, y: float) -> None:
        """One sample."""
        self._weight = FORGETTING * self._weight + 1.0
        self._x = FORGETTING * self._x + x
        self._y = FORGETTING * self._y + y
        self._xx = FORGETTING * self._xx + x * x
        self._xy = FORGETTING * self._xy + x * y

    def line(self) -> tuple[float, float]:
        """(base, slope); where all x are alike, all is put down to x."""
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        through_zero = mean_y / mean_x if mean_x > 0 else 0.0
        if spread <= MIN_SPREAD * mean_x * mean_x:
            return 0.0, through_zero
        slope = (self._xy / self._weight - mean_x * mean_y) / spread
        base = mean_y - slope * mean_x
        if slope < 0.0:
            return mean_y, 0.0
        return (base, slope) if base >= 0.0 else (0.0, through_zero)


class Rates:
    """One backend's speed. Times in ms."""

    def __init__(self) -> None:
        self._prefill = LineFit()
        self._decode = LineFit()

    def prefilled(self, new_tokens: int, ttft_ms: float) -> None:
        """A prompt with so many tokens that were not cached, alone in its prefill."""
        self._prefill.add(new_tokens, ttft_ms)

    def decoded(self, rows: int, tokens: int, duration_ms: float) -> None:
        """An answer of so many tokens, first to last, beside `rows - 1` others."""
        if tokens >= MIN_DECODE_TOKENS:
            self._decode.add(rows, duration_ms / (tokens - 1))

    @property
    def prefill(self) -> PrefillFit:
        """Today's prefill model."""
        base, slope = self._prefill.line()
        return PrefillFit(base, slope, 0.0, self._prefill.confidence)

    @property
    def decode(self) -> DecodeFit:
        """Today's decode model."""
        base, slope = self._decode.line()
        return DecodeFit(base, slope, 0.0, self._decode.confidence)
