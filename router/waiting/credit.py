"""Whether a pool should be given more work now, or whoever wants some should wait in the router.

A replica's own queue is first come first served: what lies there can't be ordered fairly any more.
So it gets no more than keeps it busy until the next is there: a bounded time of prefill, as its
own speed has it, as many requests as it runs at once, and no more KV than it has.

Our engine computes the shortest prompts first. So before one of a given size only what is no longer
than that counts: behind a long one there is room for a short one that will pass it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from events.load import OWN_ENGINE, PREFILL
from router.choice.cost import MAX_BACKLOG_AGEING_MS, SOME_MS
from router.choice.reserve import SIZES, Booked, Ledger, size_of
from router.fleet.board import backlog_ms
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.waiting.fair import SIZE_TOKENS

SCAN_S = 20e-6
"""For each replica that was looked at in vain: so long nobody looks again."""

ANY = SIZES
"""For what is of any size: all that is there lies before it."""


class _Roster:
    """The members of a pool that answer, and where to look first; `helped`: others might too."""

    def __init__(self, members: list[Member], helped: bool) -> None:
        self.members = members
        self.helped = helped
        self.at = 0
        self.full_until_s = [0.0] * (SIZES + 1)


class Credit:
    """Reads the fleet and the ledger of reservations, and changes nothing. `helpers` are those of a
    pool that compute prompts and answer all the same now."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        ahead_ms: float,
        clock: Callable[[], float] = time.monotonic,
        helpers: Callable[[str], Sequence[Member]] = lambda pool: (),
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._ahead_ms = ahead_ms
        self._clock = clock
        self._helpers = helpers
        self._version = fleet.roster_version
        self._rosters: dict[str, _Roster] = {}

    def room(self, pool: str, size: int = ANY) -> bool:
        """Whether some replica of its revision should get more, of that size. True as well where
        none can be routed to: then the choice says why. A few microseconds while there is room."""
        roster = self._roster(pool)
        now_s = self._clock()
        if now_s < roster.full_until_s[size]:
            return False
        found = self._search(roster, size, now_s)
        found = found or (roster.helped and self._helped(pool, size, now_s))
        if not found:
            roster.full_until_s[size] = now_s + SCAN_S * len(roster.members)
        return found

    def _search(self, roster: _Roster, size: int, now_s: float) -> bool:
        """From where there was room last. Who is unheard counts only where everybody is."""
        count, heard, unheard_room, routable = len(roster.members), False, False, False
        for step in range(count):
            at = (roster.at + step) % count
            member = roster.members[at]
            if member.unavailable(now_s) is not None:
                continue
            routable, unheard = True, member.unheard(now_s)
            heard |= not unheard
            if self._has_room(member, size, now_s):
                if not unheard:
                    roster.at = at
                    return True
                unheard_room = True
        return not routable or (unheard_room and not heard)

    def _helped(self, pool: str, size: int, now_s: float) -> bool:
        """Whether one that helps has room."""
        return any(
            member.unavailable(now_s) is None
            and not member.unheard(now_s)
            and self._has_room(member, size, now_s)
            for member in self._helpers(pool)
        )

    def _has_room(self, member: Member, size: int, now_s: float) -> bool:
        booked, load = self._ledger.booked(member.replica), member.load
        if not booked.requests:
            return True
        if booked.requests >= member.hello.max_running:
            return False
        if load is not None and load.free_blocks + load.cached_blocks <= booked.unseen_blocks:
            return False
        # The first token is told at once, the backlog only with the next report.
        return not booked.prefilling or _ahead_ms(member, booked, size, now_s) < self._ahead_ms

    def _roster(self, pool: str) -> _Roster:
        if self._version != self._fleet.roster_version:
            self._rosters.clear()
            self._version = self._fleet.roster_version
        roster = self._rosters.get(pool)
        if roster is None:
            members = self._kin(pool)
            answering = _answering(members)
            helped = len(answering) < len(members)
            roster = self._rosters[pool] = _Roster(answering, helped)
        return roster

    def _kin(self, pool: str) -> list[Member]:
        """Of all pools of its revision: a request goes to any of them."""
        pools = self._fleet.pools()
        if pool not in pools:
            return self._fleet.members(pool)
        revision = pools[pool].revision
        kin = [name for name, other in pools.items() if other.revision == revision]
        return [member for name in kin for member in self._fleet.members(name)]


def _ahead_ms(member: Member, booked: Booked, size: int, now_s: float) -> float:
    """Prefill work that is done before a newcomer's."""
    age_ms = min(MAX_BACKLOG_AGEING_MS, 1e3 * (now_s - member.load_at_s))
    ahead_ms = max(0.0, backlog_ms(member) - age_ms) + booked.unseen_prefill_ms
    if size == ANY or member.hello.engine != OWN_ENGINE:
        return ahead_ms
    return ahead_ms * _share_before(booked, member.prefill.predict_ms(0, SIZE_TOKENS[size]))


def _share_before(booked: Booked, prefill_ms: float) -> float:
    """How much of what is being prefilled is no longer than that, told by what is booked here."""
    sizes = [max(0.0, part_ms) for part_ms in booked.prefill_ms_of_size]
    total_ms = sum(sizes)
    return sum(sizes[: size_of(prefill_ms) + 1]) / total_ms if total_ms > SOME_MS else 1.0


def _answering(members: list[Member]) -> list[Member]:
    """Those that compute prompts for others take no place in the queue away: whoever is let go
    needs room where it is answered. Where nobody else is there they are all that answer."""
    return [member for member in members if member.hello.role != PREFILL] or members
