"""How many requests may be on their way to one that answers: it must have room when they come.

What is handed off lies in a store until it is answered; a replica that is full would leave it there
to be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.choice.reserve import Ledger
from router.fleet.member import Member


class DecodeQuota:
    """A `share` of the requests that each runs at once, and the KV that it has left. Counts what
    this router has pledged: those whose prompts are being computed for it."""

    def __init__(self, ledger: Ledger, share: float) -> None:
        self._ledger = ledger
        self._share = share
        self._requests: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()

    def pledged(self, replica: str) -> int:
        """Requests on their way to it."""
        return self._requests[replica]

    def limit(self, member: Member) -> int:
        """Requests that it may have; at least one."""
        return max(1, int(self._share * member.hello.max_running))

    def has_room(self, member: Member, blocks: int) -> bool:
        """Whether one more of so many blocks may be sent on its way there."""
        load, booked = member.load, self._ledger.booked(member.replica)
        requests, free = booked.requests, member.total_blocks
        if load is not None:
            requests = max(requests, load.running + load.waiting + booked.unseen_requests)
            free = load.free_blocks + load.cached_blocks
        free -= booked.unseen_blocks + self._blocks[member.replica]
        return requests + self._requests[member.replica] < self.limit(member) and free >= blocks

    @contextmanager
    def pledge(self, replica: str, blocks: int) -> Iterator[None]:
        """One more is on its way, until its prompt is there or it turned out otherwise."""
        self._requests[replica] += 1
        self._blocks[replica] += blocks
        try:
            yield
        finally:
            self._requests[replica] -= 1
            self._blocks[replica] -= blocks
            if not self._requests[replica]:
                del self._requests[replica], self._blocks[replica]
