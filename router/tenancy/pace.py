"""How fast work leaves, and from it when whoever was refused should come again."""

from __future__ import annotations

from collections.abc import Callable

from router.telemetry.rate import Rate

MAX_WAIT_S = 60.0
HALF_LIFE_S = 10.0


class DrainRate(Rate):
    """Tokens that have left, a second of the clock's time since its first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, HALF_LIFE_S)
        self._since_s = clock()

    def per_s(self) -> float:
        """Tokens per second, lately; 0 while nothing is known."""
        recent_per_s = super().per_s()
        seen = 1.0 - 0.5 ** ((self._at_s - self._since_s) / HALF_LIFE_S)
        return recent_per_s / seen if seen > 0 else 0.0

    def wait_s(self, tokens: float) -> float:
        """How long it takes until so many more have left; 1 s where nothing is known."""
        rate = self.per_s()
        return tokens / rate if rate > 0 else 1.0


def retry_after_s(wait_s: float) -> float:
    """A wait that a client may be asked for; the answer spreads it (router/openai/errors)."""
    return min(MAX_WAIT_S, max(1.0, wait_s))
