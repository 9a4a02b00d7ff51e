"""The circuit breaker of one replica: consecutive faults open it, a single trial closes it.

Only faults of the replica are counted (transport errors, timeouts, 5xx), never a caller's mistake:
who calls `failure` has already made that distinction.
"""

from __future__ import annotations

import math
from enum import StrEnum

FAILURES_TO_OPEN = 3
OPEN_S = 2.0
OPEN_MAX_S = 60.0
FADE_S = 10.0
"""A breaker forgets failures after this, step by step: where no request comes, none can succeed,
and to one that is suspected none comes while others have room."""
TRIAL_S = 120.0


class BreakerState(StrEnum):
    """HALF_OPEN lets one request through to see whether the replica is well again."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Time is an argument (monotonic seconds), so that nothing here waits. `admits_from_s`: from
    when on one more request may go there, -inf while it is `closed`."""

    def __init__(self) -> None:
        self.failures = 0
        self.closed = True
        self.admits_from_s = -math.inf
        self._failed_at_s = -math.inf
        self._open_until_s: float | None = None
        self._open_for_s = OPEN_S
        self._trial_until_s: float | None = None

    def state(self, now_s: float) -> BreakerState:
        """What a request that comes now would meet."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def admits(self, now_s: float) -> bool:
        """Whether one more request may go there now."""
        return now_s >= self.admits_from_s

    def wait_s(self, now_s: float) -> float:
        """How long until a request may be let through again."""
        if self.admits(now_s):
            return 0.0
        until = self._open_until_s if self.state(now_s) is BreakerState.OPEN else None
        return max(0.0, (until or self._trial_until_s or now_s) - now_s)

    def begin(self, now_s: float) -> None:
        """A request was sent: in the half-open state it is the trial, and the only one.

        The trial ends with its outcome, or after `TRIAL_S` when none is ever told."""
        if self._open_until_s is not None and now_s >= self._open_until_s:
            self._trial_until_s = now_s + TRIAL_S
            self._settle()

    def alive(self, now_s: float) -> None:
        """A first token came: enough to end a trial, not yet to forget the failures before it, for
        a replica that breaks every stream after its first token is not well."""
        if self._open_until_s is not None and now_s >= self._open_until_s:
            self._open_until_s = self._trial_until_s = None
            self.failures = FAILURES_TO_OPEN - 1
            self._settle()

    def success(self) -> bool:
        """A request was served to its end; whether there was anything to forget."""
        was_well = self.closed and not self.failures
        self.failures = 0
        self._open_until_s = self._trial_until_s = None
        self._open_for_s = OPEN_S
        if not was_well:
            self._settle()
        return not was_well

    def fade(self, now_s: float) -> bool:
        """Forget failures long past; whether there were any. Where they have opened it and nobody
        came for a trial, the last one only is, and the next opens it for longer."""
        if not self.failures or self._trial_until_s is not None:
            return False
        if now_s - max(self._failed_at_s, self._open_until_s or -math.inf) < FADE_S:
            return False
        if self._open_until_s is None:
            self.failures = 0
            return True
        self._open_until_s, self._failed_at_s = None, now_s
        self._open_for_s = min(OPEN_MAX_S, 2 * self._open_for_s)
        self.failures = FAILURES_TO_OPEN - 1
        self._settle()
        return True

    def undecided(self) -> None:
        """A request ended without saying anything about the replica: a trial may be tried again."""
        self._trial_until_s = None
        self._settle()

    def trip(self, now_s: float) -> None:
        """It hangs: no further failure is needed."""
        self.failures = max(self.failures, FAILURES_TO_OPEN - 1)
        self.failure(now_s)

    def failure(self, now_s: float) -> None:
        """The replica failed: consecutive failures open the breaker, each time for longer."""
        self.failures += 1
        self._failed_at_s = now_s
        self._trial_until_s = None
        if self._open_until_s is not None:
            if self.state(now_s) is BreakerState.HALF_OPEN:
                self._open_for_s = min(OPEN_MAX_S, 2 * self._open_for_s)
                self._open_until_s = now_s + self._open_for_s
        elif self.failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._open_for_s
        self._settle()

    def _settle(self) -> None:
        self.closed = self._open_until_s is None
        self.admits_from_s = -math.inf
        if self._open_until_s is not None:
            self.admits_from_s = max(self._open_until_s, self._trial_until_s or -math.inf)
