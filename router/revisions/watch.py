"""How a revision's latest attempts went: errors and time to first token, over a sliding window."""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import Struct

from events.decision import RouteDecision
from router.choice.route import Outcome
from router.dispatch.dispatch import RouteListener
from router.telemetry.alarms import Clock

WINDOW_S = 120.0
MAX_ATTEMPTS = 512
MIN_ATTEMPTS = 20
"""Fewer prove nothing."""

MIN_FAILED = 3
"""But so many failures do, when they are most of all there was: a breaker lets through no more."""


class _Attempt(Struct, frozen=True):
    at_s: float
    failed: bool
    ttft_ms: float | None


class Watch:
    """A RouteListener that passes on what it hears. Ends of the caller's doing are no samples."""

    def __init__(self, listener: RouteListener, clock: Clock) -> None:
        self._listener = listener
        self._clock = clock
        self._attempts: deque[_Attempt] = deque(maxlen=MAX_ATTEMPTS)

    def decided(self, decision: RouteDecision) -> None:
        """See RouteListener."""
        self._listener.decided(decision)

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        """See RouteListener."""
        self._listener.continued(decision, carried_tokens)

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """See RouteListener."""
        if outcome.replica_fault or outcome.status == "ok":
            now_s = self._clock()
            self._attempts.append(_Attempt(now_s, outcome.replica_fault, outcome.ttft_ms))
        self._listener.ended(decision, outcome)

    def forget(self) -> None:
        """Begin anew."""
        self._attempts.clear()

    @property
    def attempts(self) -> int:
        """How many are in the window."""
        while self._attempts and self._attempts[0].at_s < self._clock() - WINDOW_S:
            self._attempts.popleft()
        return len(self._attempts)

    @property
    def error_ratio(self) -> float:
        """The share that failed by the replica's fault."""
        return sum(of.failed for of in self._attempts) / self.attempts if self.attempts else 0.0

    @property
    def ttft_p90_ms(self) -> float:
        """Of those that had a first token; 0 without any."""
        times_ms = sorted(of.ttft_ms for of in self._attempts if of.ttft_ms is not None)
        return times_ms[int(0.9 * (len(times_ms) - 1))] if times_ms else 0.0

    def breach(self, ttft_ms: float, error_ratio: float) -> str:
        """Which bound the window has left; "" none, or too little is known. `ttft_ms` 0: none."""
        known = self.attempts >= MIN_ATTEMPTS
        ratio = self.error_ratio
        failing = ratio >= 0.5 and ratio * self.attempts >= MIN_FAILED
        if ratio > error_ratio and (known or failing):
            return f"{ratio:.0%} of its attempts failed"
        if known and 0 < ttft_ms < self.ttft_p90_ms:
            return f"TTFT p90 of {self.ttft_p90_ms:.0f} ms"
        return ""

    def report(self) -> dict[str, Any]:
        """For people to look at."""
        return {
            "attempts": self.attempts,
            "error_ratio": self.error_ratio,
            "ttft_p90_ms": self.ttft_p90_ms,
        }
