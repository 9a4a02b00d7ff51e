"""One movement of blocks between tiers, and the one event that ends it.

A transfer ends in exactly one way: done, failed, cancelled or expired; whoever asks first decides.
The event is told only when nobody touches the buffers any more, so that whoever owns them may give
them to somebody else in that moment (an early release is how another request's blocks get
overwritten). Knows no sockets and no tiers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class End(StrEnum):
    """How a transfer ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Ending:
    """The terminal event."""

    how: End
    reason: str = ""


class Transfer:
    """`deadline` is on the monotonic clock; late is expired, whatever the wall clock says."""

    def __init__(
        self,
        deadline: float,
        on_end: Callable[[Ending], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.deadline = deadline
        self._on_end = on_end
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: Ending | None = None
        self._touching: list[Callable[[], None] | None] = []
        self._ended = False

    @property
    def ending(self) -> Ending | None:
        """The terminal event once it was told; None before."""
        return self._asked if self._ended else None

    @property
    def asked(self) -> Ending | None:
        """The end that was asked for, or that the deadline brought: movers stop now."""
        self._expire_when_late()
        return self._asked

    def remaining_s(self) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self.deadline - self._clock())

    @contextlib.contextmanager
    def touch(self, interrupt: Callable[[], None] | None = None) -> Iterator[bool]:
        """Around every use of the buffers. Gives False when they may not be touched any more.

        `interrupt` wakes this mover out of a blocking call when the end is asked for. It is called
        with the transfer locked, so that it can't hit a mover that has moved on to other work: it
        must not block and must not call back.
        """
        self._expire_when_late()
        with self._changed:
            allowed = self._asked is None
            if allowed:
                self._touching.append(interrupt)
        try:
            yield allowed
        finally:
            if allowed:
                self._leave(interrupt)

    def end(self, how: End, reason: str = "") -> bool:
        """Ask for the end. True for the one call that decided it; later ones change nothing."""
        with self._changed:
            if self._asked is not None:
                return False
            self._asked = Ending(how, reason)
            for interrupt in self._touching:
                if interrupt is not None and how is not End.DONE:
                    interrupt()
            told = self._settle()
        self._tell(told)
        return True

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        """Blocks until the terminal event, or None after `timeout_s`.

        A wait that meets the deadline expires the transfer, then goes on waiting for its mover.
        """
        until = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._expire_when_late()
            with self._changed:
                if self._ended:
                    return self._asked
                now = self._clock()
                if until is not None and now >= until:
                    return None
                left_s = [] if until is None else [until - now]
                if self._asked is None:
                    left_s.append(self.deadline - now)
                self._changed.wait(max(0.0, min(left_s)) if left_s else None)

    def _expire_when_late(self) -> None:
        if self._asked is None and self._clock() >= self.deadline:
            self.end(End.EXPIRED, "deadline")

    def _leave(self, interrupt: Callable[[], None] | None) -> None:
        with self._changed:
            self._touching.remove(interrupt)
            told = self._settle()
        self._tell(told)

    def _settle(self) -> Ending | None:
        """With the lock held: the event, when this was the last thing that it waited for."""
        if self._ended or self._asked is None or self._touching:
            return None
        self._ended = True
        self._changed.notify_all()
        return self._asked

    def _tell(self, ending: Ending | None) -> None:
        if ending is None or self._on_end is None:
            return
        # Told once: whoever was told may hold the transfer, and shall not be held by it.
        on_end, self._on_end = self._on_end, None
        try:
            on_end(ending)
        except Exception:
            # The mover's thread must live on; the owner's fault is its own, but never silent.
            log.exception("the owner of a transfer failed at its end")
