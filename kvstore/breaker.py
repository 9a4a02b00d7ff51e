"""When a store is left alone: jittered back-off, and a breaker that lets one trial through."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
FAILURES_TO_OPEN = 3


class BreakerState(StrEnum):
    """CLOSED lets all through, OPEN nothing, HALF_OPEN waits for the one trial's result."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Breaker:
    """Opens after some failures in a row; each pause is twice the last one, plus or minus half.

    The jitter keeps many replicas from returning to a restarted server in the same moment.
    """

    def __init__(
        self,
        failures_to_open: int = FAILURES_TO_OPEN,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failures = 0
        self._pauses = 0
        self._open_until = 0.0
        self._trial_until = 0.0
        self._open = False

    @property
    def state(self) -> BreakerState:
        """What a call now would meet."""
        with self._lock:
            if not self._open:
                return BreakerState.CLOSED
            late = self._clock() >= self._open_until
            return BreakerState.HALF_OPEN if late else BreakerState.OPEN

    def allow(self, trial_s: float = 5.0) -> bool:
        """Whether to try now. In HALF_OPEN one caller gets True, and has `trial_s` to report."""
        with self._lock:
            if not self._open:
                return True
            now = self._clock()
            if now < self._open_until or now < self._trial_until:
                return False
            self._trial_until = now + trial_s
            return True

    def succeeded(self) -> None:
        """The store answered."""
        with self._lock:
            self._failures = self._pauses = 0
            self._open = False
            self._trial_until = 0.0

    def failed(self) -> None:
        """The store did not answer, or answered nonsense."""
        with self._lock:
            self._failures += 1
            self._trial_until = 0.0
            if self._failures < self._failures_to_open:
                return
            pause_s = min(self._longest_pause_s, self._first_pause_s * 2**self._pauses)
            self._pauses = min(self._pauses + 1, 16)
            self._open = True
            self._open_until = self._clock() + pause_s * (0.5 + self._jitter())
