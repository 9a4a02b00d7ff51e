"""What the planner remembers of those that wait and of those that they wait for: so that ten
thousand of them cost a step no more than the few that may start in it.
"""

from __future__ import annotations

from typing import NamedTuple

from replica.sched.ledger import Later
from replica.sched.plan import ChildId
from replica.sched.request import Request
from replica.sched.seats import Seats


class Standing:
    """Who has a seat while one step is planned, and which of them lead: they compute blocks that
    others may wait for."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self._leaders = [request for request in seats.requests if _leads(request)]

    def add(self, request: Request) -> None:
        """One more, started by this plan."""
        self.seats.add(request)
        if _leads(request):
            self._leaders.append(request)

    def hit_with_leader(self, request: Request, found: int, limit: int) -> int | None:
        """How many blocks a waiting request has in the cache if one of the leaders is about to have
        the next one of at most `limit`; None if nobody is. `found`: as many as were there once.

        What a leader has published is a hit too: keys are chained, so whoever shares its next one
        shares all before it. That spares a lookup in every step until the leader is done.
        """
        limit = min(limit, len(request.keys))
        for leader in self._leaders:
            index = max(found, len(leader.nodes))
            shared = index < min(limit, len(leader.keys))
            if shared and leader.keys[index] == request.keys[index]:
                return index
        return None


class Blocked(NamedTuple):
    """The first of those that wait, and how it was told to: `shut`, there was no seat for it
    whatever is available; else `available` blocks were too few. From `displaces_s` on it may be so
    late that others give way; at `until_s` it is asked again whatever has changed.
    """

    child: ChildId
    answer: Later
    shut: bool
    seats: int
    turns: int
    available: int
    displaces_s: float
    until_s: float

    def holds(self, request: Request, seats: Seats, available: int, now_s: float) -> bool:
        """Whether the answer would be the same: those that run have taken what they were believed
        to need, and nobody has ended."""
        same = (self.child, self.seats, self.turns) == (request.child, len(seats), seats.turns)
        return same and (self.shut or available <= self.available) and now_s < self.until_s


def _leads(request: Request) -> bool:
    return len(request.nodes) < len(request.keys) and not request.sealed
