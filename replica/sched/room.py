"""Room for one more, as a router is told of it: requests wait for KV that nobody holds yet too.

By the same needs as the ledger admits by. Blocks that are free now may be promised to the answers
that run; who is sent here in spite of that waits until some of them end, for seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from replica.sched.ledger import Ledger
from replica.sched.table import RequestTable

LOOK_S = 0.05
CALM_SHARE = 0.5
"""While so much of the pool can be had nobody is short, and nothing is worked out."""


@dataclass(frozen=True, slots=True)
class Room:
    """`spare_blocks`: as many as one more may come to need without waiting for them; below 0 where
    others wait already. Whoever needs more waits for `end_ms`, until the first answer ends, and
    from then on for `block_ms` a block. 0 where none is short, or no end is in sight."""

    spare_blocks: int
    end_ms: float = 0.0
    block_ms: float = 0.0


class Gauge:
    """Looks at the room when requests came or went, and every `LOOK_S` beside: each that runs costs
    some microseconds, and what is believed of them changes little from step to step."""

    def __init__(self, table: RequestTable, ledger: Ledger) -> None:
        self._table = table
        self._ledger = ledger
        self._room = Room(0)
        self._seen: tuple[int, ...] = ()
        self._until_s = 0.0

    def read(self, available: int, step_ms: float, now_s: float) -> Room:
        """As `room`."""
        table = self._table
        seen = (len(table.waiting), len(table.loading), len(table.running))
        if seen != self._seen or now_s >= self._until_s:
            self._seen, self._until_s = seen, now_s + LOOK_S
            self._room = room(table, self._ledger, available, step_ms)
        return self._room


def room(table: RequestTable, ledger: Ledger, available: int, step_ms: float) -> Room:
    """`available`: blocks that are free, or cached and in nobody's use."""
    if available >= CALM_SHARE * ledger.usable_blocks:
        return Room(available)
    seats = ledger.seats([*table.running, *table.loading])
    spare = ledger.spare(seats, available) - _awaited_blocks(table, ledger)
    returned = sum(need.returned_blocks for need in seats.needs)
    if not returned:
        return Room(spare)
    ends = [need for need in seats.needs if need.returned_blocks]
    first_tokens = ends[-1].rest_tokens
    # Ends that are spread evenly: half of all has come back by their mean.
    later = sum(need.returned_blocks * (need.rest_tokens - first_tokens) for need in ends)
    block_ms = 2.0 * step_ms * later / returned**2
    return Room(spare, step_ms * first_tokens, block_ms)


def _awaited_blocks(table: RequestTable, ledger: Ledger) -> int:
    """By those that wait. How long their answers get is asked of the first: there may be many."""
    if not table.waiting:
        return 0
    rest_tokens = len(table.waiting) * ledger.lengths.rest(table.waiting[0]).tokens
    return ledger.limits.blocks(table.waiting_tokens - table.waiting_hit_tokens + rest_tokens)
