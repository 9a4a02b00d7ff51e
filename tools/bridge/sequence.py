"""In which order the messages of an engine are believed: by their numbers, from 0 on, per life."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What to do with a message. GAP: those before it are asked for first. RESTART: another engine
    counts from 0 again, all that is known is over."""

    NEXT = "next"
    OLD = "old"
    GAP = "gap"
    RESTART = "restart"


class Sequence:
    """`applied` is the number of the last message that was taken in, -1 before the first."""

    def __init__(self) -> None:
        self.applied = -1
        self._live = -1

    def live(self, number: int) -> Verdict:
        """A message of the live stream, which never repeats itself and never goes back."""
        if number <= self._live:
            return Verdict.RESTART
        self._live = number
        return self._judge(number)

    def replayed(self, number: int) -> Verdict:
        """A message that was asked for: it may overlap with the live ones."""
        return self._judge(number)

    def take(self, number: int) -> None:
        """This message was taken in."""
        self.applied = number

    def _judge(self, number: int) -> Verdict:
        if number <= self.applied:
            return Verdict.OLD
        return Verdict.NEXT if number == self.applied + 1 else Verdict.GAP
