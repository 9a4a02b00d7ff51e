"""How many requests may be on their way to one that answers: it must have room when they come.

What is handed off lies in a store until it is answered; a replica that is full would leave it there
to be evicted. Routers tell each other what they have pledged: a replica is sent more than it has
room for by what comes within one sync delay at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from events.peer import Pledged
from router.choice.reserve import Ledger
from router.cluster.peers import MAX_PLEDGED, Peers, together
from router.fleet.member import Member


class DecodeQuota:
    """A `share` of the requests that each runs at once, and the KV that it has left. Counts what
    is pledged, here and by other routers: those whose prompts are being computed for it."""

    def __init__(self, ledger: Ledger, peers: Peers, share: float) -> None:
        self._ledger = ledger
        self._peers = peers
        self._share = share
        self._requests: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._wake: Callable[[], None] = lambda: None

    def on_work(self, wake: Callable[[], None]) -> None:
        """Whom to tell that there is something to take."""
        self._wake = wake

    def take(self) -> tuple[Pledged, ...]:
        """What is pledged here to those replicas of which it changed since the last call."""
        changed, self._changed = self._changed, set()
        return tuple(map(self._here, changed))

    def all(self) -> tuple[Pledged, ...]:
        """What is pledged here."""
        return tuple(map(self._here, sorted(self._requests)[:MAX_PLEDGED]))

    def pledged(self, replica: str) -> int:
        """Requests on their way to it."""
        return self._requests[replica] + self._peers.pledged(replica).requests

    def limit(self, member: Member) -> int:
        """Requests that it may have; at least one."""
        return max(1, int(self._share * member.hello.max_running))

    def has_room(self, member: Member, blocks: int) -> bool:
        """Whether one more of so many blocks may be sent on its way there."""
        load, replica = member.load, member.replica
        booked = together(self._ledger.booked(replica), self._peers.booked(replica))
        requests, free = booked.requests, member.total_blocks
        if load is not None:
            requests = max(requests, load.running + load.waiting + booked.unseen_requests)
            free = load.free_blocks + load.cached_blocks
        free -= booked.unseen_blocks + self._blocks[replica] + self._peers.pledged(replica).blocks
        return requests + self.pledged(replica) < self.limit(member) and free >= blocks

    @contextmanager
    def pledge(self, replica: str, blocks: int) -> Iterator[None]:
        """One more is on its way, until its prompt is there or it turned out otherwise."""
        self._count(replica, 1, blocks)
        try:
            yield
        finally:
            self._count(replica, -1, -blocks)

    def _count(self, replica: str, requests: int, blocks: int) -> None:
        self._requests[replica] += requests
        self._blocks[replica] += blocks
        if not self._requests[replica]:
            del self._requests[replica], self._blocks[replica]
        if not self._peers.alone:
            self._changed.add(replica)
            self._wake()

    def _here(self, replica: str) -> Pledged:
        return Pledged(replica, self._requests[replica], self._blocks[replica])
