"""One request's load: what is wanted, what has come, and the one event that ends it."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from kvstore.level import Level
from kvstore.transfer import Transfer
from replica.sched.tiers import Wanted


class Phase(Enum):
    """QUEUED: waits for a thread. FETCHING: a thread brings blocks. PAUSED: as many as may wait for
    their request are there. FETCHED: no more will come."""

    QUEUED = auto()
    PAUSED = auto()
    FETCHING = auto()
    FETCHED = auto()


class Load:
    """Belongs to the loader, whose lock guards it.

    `ready` holds staging slots of checked blocks, in order, not yet on the device, each with the
    level that it came from; `came` counts all that ever were there. `passed` counts the blocks that
    left it, of which the first `skip` are not needed: the device had them when the request was
    admitted. `blocks` and `transfer` are there from admission on. `checked`: its last block will be
    computed and compared; `withheld`: that block was put aside. `over`: nothing that still comes is
    of use.
    """

    def __init__(self, wanted: Wanted, deadline: float) -> None:
        self.wanted = wanted
        self.deadline = deadline
        self.phase = Phase.QUEUED
        self.ready: deque[tuple[int, Level]] = deque()
        self.came = self.passed = self.skip = 0
        self.blocks: tuple[int, ...] = ()
        self.transfer: Transfer | None = None
        self.checked = self.withheld = self.over = False

    @property
    def empty(self) -> bool:
        """Nothing came and nothing will."""
        return self.phase is Phase.FETCHED and not self.ready and not self.passed

    @property
    def landed(self) -> int:
        """Leading blocks of the request's own that are on the device."""
        return max(0, self.passed - self.skip)

    @property
    def done(self) -> bool:
        """All that will ever come is on the device."""
        full = self.withheld or self.landed == len(self.blocks)
        return full or (self.phase is Phase.FETCHED and not self.ready)
