"""A plan in the making."""

from __future__ import annotations

from replica.sched.plan import ChildId, PlanRow
from replica.sched.request import Request
from replica.sched.standing import Standing

FOUND_BLOCKS_PER_MS = 38
LEAST_FOUND_BLOCKS = 768
"""So many cached blocks those whom one step starts find together, as far as can be foreseen, for
each ms of the step that runs meanwhile: at one or two microseconds a block planning takes a tenth
of it. Whoever comes first is started, however many it finds. Those that wait for blocks from below
count too, for the time is spent; but while nobody runs there is no step to hold up."""


class Draft:
    """The plan in the making: its rows, and how many tokens each request may compute in it.

    `ahead`: another plan is in flight. Then nobody is preempted, for that would free nothing now;
    `starved` says that somebody would have to be. `displaced`: somebody was, for one that waited;
    the next one has to wait for the next step. `unloaded`: who was found to wait for a load.
    `found_blocks`: what those that it starts found in the cache; `step_ms` is what a step takes on
    the device. `standing`: who has a seat, until
    somebody loses one.
    """

    def __init__(self, ahead: bool, step_ms: float) -> None:
        self.rows: list[PlanRow] = []
        self.requests: list[Request] = []
        self.quotas: dict[ChildId, int] = {}
        self.ahead = ahead
        self.starved = False
        self.displaced = False
        self.unloaded = self.found_blocks = 0
        self.standing: Standing | None = None
        self._most_found_blocks = max(LEAST_FOUND_BLOCKS, int(FOUND_BLOCKS_PER_MS * step_ms))

    def finds_too_many(self, hit_blocks: int) -> bool:
        """Whether one who probably finds so many blocks has to wait for the next step."""
        return bool(self.found_blocks) and self.found_blocks + hit_blocks > self._most_found_blocks

    def add(self, request: Request, row: PlanRow) -> None:
        """One more row."""
        self.rows.append(row)
        self.requests.append(request)
