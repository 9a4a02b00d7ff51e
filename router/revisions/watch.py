"""How a revision's latest attempts went: errors and time to first token, over a sliding window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
    """`judged`: whether its end says anything of the revision. `ttft_ms`: until its first token, or
    until it was given up without one."""

    at_s: float
    judged: bool
    failed: bool
    ttft_ms: float
    begun: bool


class Watch:
    """A RouteListener that passes on what it hears. An end of the caller's doing says nothing of
    errors, but how long he waited is known: whoever never answers is slow too. `waits` tells of a
    decision whether it has no first token yet; without it those under way are not looked at."""

    def __init__(
        self, listener: RouteListener, clock: Clock, waits: Callable[[str], bool] | None = None
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._waits = waits
        self._attempts: deque[_Attempt] = deque(maxlen=MAX_ATTEMPTS)
        self._open: dict[str, float] = {}

    def decided(self, decision: RouteDecision) -> None:
        """See RouteListener."""
        if self._waits is not None:
            self._open[decision.decision_id] = self._clock()
        self._listener.decided(decision)

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        """See RouteListener."""
        self._listener.continued(decision, carried_tokens)

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """See RouteListener."""
        self._open.pop(decision.decision_id, None)
        failed, begun = outcome.replica_fault, outcome.ttft_ms is not None
        judged = failed or outcome.status == "ok"
        waited_ms = outcome.e2e_ms if outcome.ttft_ms is None else outcome.ttft_ms
        self._attempts.append(_Attempt(self._clock(), judged, failed, waited_ms, begun))
        self._listener.ended(decision, outcome)

    def forget(self) -> None:
        """Begin anew."""
        self._attempts.clear()
        self._open.clear()

    @property
    def attempts(self) -> int:
        """How many in the window ended in a way that tells."""
        return len(self._judged())

    def _judged(self) -> list[_Attempt]:
        return [of for of in self._recent() if of.judged]

    def _recent(self) -> deque[_Attempt]:
        since_s = self._clock() - WINDOW_S
        while self._attempts and self._attempts[0].at_s < since_s:
            self._attempts.popleft()
        return self._attempts

    @property
    def error_ratio(self) -> float:
        """The share that failed by the replica's fault."""
        judged = self._judged()
        return sum(of.failed for of in judged) / len(judged) if judged else 0.0

    @property
    def ttft_p90_ms(self) -> float:
        """Of those that had a first token; 0 without any."""
        return _p90([of.ttft_ms for of in self._recent() if of.begun])

    def _waits_ms(self, beyond_ms: float) -> list[float]:
        """Times to first token, and of those without one what is beyond that already."""
        times_ms = [of.ttft_ms for of in self._recent() if of.begun or of.ttft_ms > beyond_ms]
        now_s, waits = self._clock(), self._waits
        for decision_id, since_s in self._open.items():
            waited_ms = 1e3 * (now_s - since_s)
            if waited_ms > beyond_ms and waits is not None and waits(decision_id):
                times_ms.append(waited_ms)
        return times_ms

    def breach(self, ttft_ms: float, error_ratio: float) -> str:
        """Which bound the window has left; "" none, or too little is known. `ttft_ms` 0: none."""
        known = self.attempts >= MIN_ATTEMPTS
        ratio = self.error_ratio
        failing = ratio >= 0.5 and ratio * self.attempts >= MIN_FAILED
        if ratio > error_ratio and (known or failing):
            return f"{ratio:.0%} of its attempts failed"
        if ttft_ms > 0:
            times_ms = self._waits_ms(ttft_ms)
            if len(times_ms) >= MIN_ATTEMPTS and _p90(times_ms) > ttft_ms:
                return f"TTFT p90 of {_p90(times_ms):.0f} ms"
        return ""

    def report(self) -> dict[str, Any]:
        """For people to look at."""
        return {
            "attempts": self.attempts,
            "error_ratio": self.error_ratio,
            "ttft_p90_ms": self.ttft_p90_ms,
        }


def _p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0.0
