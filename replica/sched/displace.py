"""Running requests that give way to a waiting one that is more urgent, where that pays.

By priority: those of lower priority go, where waiting for a place takes longer than computing their
KV again. By deadline: where waiting would make a first token come too late that otherwise is in
time, those go who have the time (their own first token is out, or was promised to nobody; no gap
between tokens was promised; their end is far), and what they cost, times all who wait for the
device meanwhile, is less than the delay.

It can't go back and forth. Whoever is displaced had a lower priority, or no first token that is
due; so it never displaces in turn the one that took its place. And it happens to nobody more than
MAX_PREEMPTIONS times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from replica.cache.prefix import PrefixCache
from replica.sched.ledger import Granted, Ledger
from replica.sched.order import Policy
from replica.sched.request import Request
from replica.sched.seats import Seats
from replica.sched.table import RequestTable
from replica.sched.timing import Timing
from replica.sched.victims import MAX_PREEMPTIONS, Victims

RECHECK_S = 0.05
"""So long at least a request waits after it was found that nobody gives way."""

PRIORITY = "priority"
DEADLINE = "deadline"

NEVER_S = float("inf")


class Displaced(NamedTuple):
    """Who gives way, and by which of the two rules; nobody where `requests` is empty."""

    requests: list[Request]
    reason: str


class Displacement:
    """Chooses; the planner preempts. `policy` says which of the two rules its order has."""

    def __init__(
        self, policy: Policy, ledger: Ledger, cache: PrefixCache, timing: Timing, victims: Victims
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._cache = cache
        self._timing = timing
        self._victims = victims

    def choose(
        self,
        request: Request,
        table: RequestTable,
        seats: Seats,
        now_s: float,
    ) -> Displaced:
        """Those who run and in whose place the request would be admitted at once."""
        running, waiting = table.running, len(table.waiting)
        enough = self._enough(request, seats)
        wait_ms = self._wait_ms(seats)
        if self._policy.by_priority:
            lower = [each for each in running if each.spec.priority < request.spec.priority]
            chosen = self._together(lower, wait_ms, enough)
            if chosen:
                return Displaced(chosen, PRIORITY)
        late_ms = self._late_ms(request, wait_ms, now_s)
        if late_ms <= 0.0:
            return Displaced([], DEADLINE)
        patient = [each for each in running if self._patient(each, request, wait_ms, now_s)]
        gain_ms = min(wait_ms, late_ms) / waiting
        return Displaced(self._together(patient, gain_ms, enough), DEADLINE)

    def again_s(self, request: Request, seats: Seats, now_s: float) -> float:
        """When to ask again, if nothing else changes."""
        first_by_s = request.spec.first_by_s
        if first_by_s is None or not self._has_due_token(request):
            return NEVER_S
        needs_s = 1e-3 * (self._wait_ms(seats) + self._first_ms(request) * (1.0 + self._error()))
        return max(now_s + RECHECK_S, first_by_s - needs_s)

    def _together(
        self,
        candidates: list[Request],
        gain_ms: float,
        enough: Callable[[list[Request], int], bool],
    ) -> list[Request]:
        """Those who together free enough, and cost less than `gain_ms` to compute again; nobody
        where that can't be."""
        spared = [each for each in candidates if each.preemptions < MAX_PREEMPTIONS]
        chosen: list[Request] = []
        freed, cost_ms = 0, 0.0
        for victim in self._victims.ranked(spared):
            chosen.append(victim.request)
            freed += victim.freed_blocks
            cost_ms += self._victims.recompute_ms(victim.request)
            if cost_ms >= gain_ms:
                return []
            if enough(chosen, freed):
                return chosen
        return []

    def _enough(self, request: Request, seats: Seats) -> Callable[[list[Request], int], bool]:
        def enough(victims: list[Request], freed: int) -> bool:
            left = self._ledger.seats([each for each in seats.requests if each not in victims])
            if not isinstance(self._ledger.door(request, left), Granted):
                return False
            room = self._cache.available + freed
            return isinstance(self._ledger.room(request, 0, left, room), Granted)

        return enough

    def _wait_ms(self, seats: Seats) -> float:
        """Until the first of them ends by itself."""
        return seats.least_rest_tokens * self._timing.step_ms

    def _late_ms(self, request: Request, wait_ms: float, now_s: float) -> float:
        """By how much its first token comes too late if it waits; 0 where it comes in time, or
        would come too late all the same."""
        first_by_s = request.spec.first_by_s
        if first_by_s is None or not self._has_due_token(request):
            return 0.0
        first_ms, left_ms = self._first_ms(request), 1e3 * (first_by_s - now_s)
        if first_ms > left_ms:
            return 0.0
        return wait_ms + first_ms * (1.0 + self._error()) - left_ms

    def _has_due_token(self, request: Request) -> bool:
        """Whether it may displace by its deadline: its first token is still to come, and the time
        that takes is known."""
        sure = self._timing.sure_error is not None
        fresh = not request.scheduled_s and not request.generated
        return self._policy.by_deadline and sure and fresh

    def _patient(self, each: Request, request: Request, wait_ms: float, now_s: float) -> bool:
        """Whether a running request has the time to wait, and to be computed again."""
        spec = each.spec
        if spec.priority > request.spec.priority or spec.itl_ms is not None:
            return False
        if spec.first_by_s is not None and not each.generated:
            return False
        if spec.deadline_s is None:
            return True
        rest_ms = self._ledger.lengths.rest(each).tokens * self._timing.step_ms
        needs_ms = wait_ms + self._first_ms(request) + self._victims.recompute_ms(each) + rest_ms
        return now_s + 1e-3 * needs_ms * (1.0 + self._error()) < spec.deadline_s

    def _first_ms(self, request: Request) -> float:
        """From its start to its first token."""
        hit = request.expected_hit
        return self._timing.prefill.predict_ms(hit, len(request.tokens) - hit)

    def _error(self) -> float:
        return self._timing.sure_error or 0.0
