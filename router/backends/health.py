"""Whether a backend is there: by probes and requests, never by a single one of them."""

from __future__ import annotations

FAILURES_TO_DOWN = 3
SUCCESSES_TO_UP = 2


class Health:
    """One backend. The first success ever counts at once: nobody waits for a second probe."""

    def __init__(self) -> None:
        self.up = False
        self._known = False
        self._failures = 0
        self._successes = 0

    @property
    def down(self) -> bool:
        """Whether it has failed to answer again and again, and still does."""
        return not self.up and self._failures >= FAILURES_TO_DOWN

    def heard(self) -> None:
        """It showed that it lives, whatever its probes do."""
        self._failures = 0

    def success(self) -> bool:
        """It answered; whether that brings it up."""
        self._failures = 0
        self._successes += 1
        if self.up or (self._known and self._successes < SUCCESSES_TO_UP):
            return False
        self.up = self._known = True
        return True

    def failure(self) -> bool:
        """It did not; whether that takes it down."""
        self._successes = 0
        self._failures += 1
        if not self.up or self._failures < FAILURES_TO_DOWN:
            return False
        self.up = False
        return True
