"""A plan in the making."""

from __future__ import annotations

from replica.sched.plan import ChildId, PlanRow
from replica.sched.request import Request
from replica.sched.standing import Standing

MAX_FOUND_BLOCKS = 768
"""So many cached blocks those whom one step starts find together, as far as can be foreseen: each
takes one or two microseconds. Whoever comes first is started, however many it finds."""


class Draft:
    """The plan in the making: its rows, and how many tokens each request may compute in it.

    `ahead`: another plan is in flight. Then nobody is preempted, for that would free nothing now;
    `starved` says that somebody would have to be. `displaced`: somebody was, for one that waited;
    the next one has to wait for the next step. `unloaded`: who was found to wait for a load.
    `found_blocks`: what those that it starts found in the cache. `standing`: who has a seat, until
    somebody loses one.
    """

    def __init__(self, ahead: bool) -> None:
        self.rows: list[PlanRow] = []
        self.requests: list[Request] = []
        self.quotas: dict[ChildId, int] = {}
        self.ahead = ahead
        self.starved = False
        self.displaced = False
        self.unloaded = self.found_blocks = 0
        self.standing: Standing | None = None

    def finds_too_many(self, hit_blocks: int) -> bool:
        """Whether one who probably finds so many blocks has to wait for the next step."""
        return bool(self.found_blocks) and self.found_blocks + hit_blocks > MAX_FOUND_BLOCKS

    def add(self, request: Request, row: PlanRow) -> None:
        """One more row."""
        self.rows.append(row)
        self.requests.append(request)
