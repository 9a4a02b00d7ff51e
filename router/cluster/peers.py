"""What the other routers have on its way to replicas, as far as they have told.

Only what no load report here includes yet is kept: a report counts the rest. Pure state, no bus.
Messages may be lost, doubled, late or of a former life: numbers tell, a whole state mends it, and
a router that is not heard any more counts for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from events.peer import Inside, PeerDelta, PeerState, Pledged, Sent
from events.subjects import router_boot_name
from router.choice.reserve import Booked, size_of
from router.cluster.marks import Marks

GONE_S = 6.0
MAX_PEERS = 63
MAX_OPEN = 8_192
"""Dispatches of one router that no report shows; beyond it the oldest are forgotten."""

MAX_TENANTS = 4_096
"""Of one router that are told of; of the others nothing counts elsewhere."""

MAX_PLEDGED = 1_024
"""Replicas that are told of for one router."""

MARKS_TTL_S = 5.0
"""Beyond its prefill: until the replica's digest shows the prefix."""

NOTHING = Booked()


@dataclass(frozen=True, slots=True)
class PeerView:
    """One other router, for people to look at. `whole`: nothing of it is known to be missing."""

    router: str
    boot: int
    open: int
    whole: bool
    silent_s: float


@dataclass(slots=True)
class _Peer:
    """One life of another router. `seq` is its newest message's; `open` is in the order of the
    dispatches, and so is each replica's share of their numbers in `at`."""

    boot: int
    boot_name: str
    heard_s: float
    seq: int = 0
    whole: bool = False
    open: dict[int, Sent] = field(default_factory=dict)
    at: dict[str, dict[int, None]] = field(default_factory=dict)
    inside: dict[bytes, Inside] = field(default_factory=dict)
    pledged: dict[str, Pledged] = field(default_factory=dict)


class Peers:
    """All other routers by id. `changed`: replicas whose sums are others now than when the reader
    last emptied it. `alone`: nobody else is heard."""

    def __init__(self) -> None:
        self.alone = True
        self.changed: set[str] = set()
        self.marks = Marks()
        self._peers: dict[str, _Peer] = {}
        self._booked: dict[str, Booked] = {}
        self._inside: dict[bytes, Inside] = {}
        self._pledged: dict[str, Pledged] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def open(self) -> int:
        """Dispatches of others that count here now."""
        return sum(len(peer.open) for peer in self._peers.values())

    def views(self, now_s: float) -> list[PeerView]:
        """Every router that is heard, by id."""
        return [
            PeerView(name, peer.boot, len(peer.open), peer.whole, now_s - peer.heard_s)
            for name, peer in sorted(self._peers.items())
        ]

    def booked(self, replica: str) -> Booked:
        """What others have sent there that no report shows; read it, don't keep it."""
        return self._booked.get(replica, NOTHING)

    def inside(self, tenant: bytes) -> Inside | None:
        """What a tenant, by its tag, has at the others; None for nothing."""
        return self._inside.get(tenant)

    def pledged(self, replica: str) -> Pledged:
        """What is on its way there by others, as far as its prompts."""
        return self._pledged.get(replica) or Pledged(replica)

    def hear(
        self, router: str, boot: int, seq: int, message: PeerDelta | PeerState, now_s: float
    ) -> bool:
        """Take a message in. False: something is missing now, and a whole state would mend it."""
        peer = self._life_of(router, boot, now_s)
        if peer is None:
            return True
        peer.heard_s = now_s
        if seq > peer.seq:
            whole = isinstance(message, PeerState) or (peer.whole and seq == peer.seq + 1)
            peer.seq, peer.whole = seq, whole
            self._apply(peer, message, now_s)
        return peer.whole

    def fresh(self, router: str, boot: int, seq: int) -> bool:
        """Whether a message of that number has not been taken in yet."""
        peer = self._peers.get(router)
        return peer is None or (peer.boot, peer.seq) < (boot, seq)

    def greet(self, router: str, boot: int, now_s: float) -> None:
        """It is there, and wants to hear from us."""
        peer = self._life_of(router, boot, now_s)
        if peer is not None:
            peer.heard_s = now_s

    def doubt(self) -> None:
        """Messages may have been lost, of anybody."""
        for peer in self._peers.values():
            peer.whole = False

    def note_seen(self, replica: str, seen: Mapping[str, int]) -> None:
        """A report of the replica includes dispatches up to those numbers, by router boot."""
        if replica not in self._booked:
            return
        for peer in self._peers.values():
            last = seen.get(peer.boot_name, 0)
            self._drop(peer, _up_to(last, peer.at.get(replica, ())))

    def end_life(self, replica: str) -> None:
        """The replica's life is over: what was sent to it is too."""
        self.marks.forget_replica(replica)
        for peer in self._peers.values():
            self._drop(peer, list(peer.at.get(replica, ())))

    def expire(self, now_s: float) -> None:
        """Forget the silent."""
        self.marks.expire(now_s)
        for name, peer in list(self._peers.items()):
            if now_s - peer.heard_s > GONE_S:
                self._forget(name)

    def _life_of(self, router: str, boot: int, now_s: float) -> _Peer | None:
        peer = self._peers.get(router)
        if peer is not None and boot == peer.boot:
            return peer
        if peer is not None and boot < peer.boot:
            return None
        if peer is not None:
            self._forget(router)
        elif len(self._peers) >= MAX_PEERS:
            return None
        peer = self._peers[router] = _Peer(boot, router_boot_name(router, boot), now_s)
        self.alone = False
        return peer

    def _apply(self, peer: _Peer, message: PeerDelta | PeerState, now_s: float) -> None:
        if isinstance(message, PeerState):
            self._drop(peer, list(peer.open))
            self._enter(peer, message.sent, now_s)
            self._leave(peer)
            self._stand(peer, message.inside)
            self._pledge(peer, message.pledged)
            return
        self._stand(peer, message.inside)
        self._pledge(peer, message.pledged)
        self._enter(peer, message.sent, now_s)
        for number in message.prefilled:
            if (sent := peer.open.get(number)) is not None:
                self._count(sent, -1)
                peer.open[number] = structs.replace(sent, prefilling=False)
                self._count(peer.open[number], 1)
        self._drop(peer, message.ended)

    def _enter(self, peer: _Peer, arrivals: Iterable[Sent], now_s: float) -> None:
        for sent in arrivals:
            self._put(peer, sent)
            if sent.marks:
                until_s = now_s + MARKS_TTL_S + 1e-3 * sent.prefill_ms
                self.marks.add(sent.replica, sent.marks, until_s)
        excess = len(peer.open) - MAX_OPEN
        self._drop(peer, list(peer.open)[: max(0, excess)])

    def _put(self, peer: _Peer, sent: Sent) -> None:
        self._drop(peer, (sent.seq,))
        peer.open[sent.seq] = sent
        peer.at.setdefault(sent.replica, {})[sent.seq] = None
        self._count(sent, 1)

    def _drop(self, peer: _Peer, numbers: Iterable[int]) -> None:
        for number in numbers:
            sent = peer.open.pop(number, None)
            if sent is not None:
                self._count(sent, -1)
                numbers = peer.at[sent.replica]
                del numbers[number]
                if not numbers:
                    del peer.at[sent.replica]

    def _forget(self, router: str) -> None:
        peer = self._peers.pop(router)
        self.alone = not self._peers
        self._drop(peer, list(peer.open))
        self._leave(peer)

    def _leave(self, peer: _Peer) -> None:
        self._stand(peer, [Inside(tenant) for tenant in peer.inside])
        self._pledge(peer, [Pledged(replica) for replica in peer.pledged])

    def _stand(self, peer: _Peer, told: Iterable[Inside]) -> None:
        """Those tenants have that much there now."""
        for now in told:
            before = peer.inside.pop(now.tenant, Inside(now.tenant))
            nothing = Inside(now.tenant)
            if now == nothing or len(peer.inside) >= MAX_TENANTS:
                now = nothing
            else:
                peer.inside[now.tenant] = now
            total = self._inside.pop(now.tenant, nothing)
            total = Inside(
                now.tenant,
                total.requests + now.requests - before.requests,
                total.queued + now.queued - before.queued,
                total.queued_tokens + now.queued_tokens - before.queued_tokens,
            )
            if total != nothing:
                self._inside[now.tenant] = total

    def _pledge(self, peer: _Peer, told: Iterable[Pledged]) -> None:
        """So much is on its way to those replicas now."""
        for now in told:
            nothing = Pledged(now.replica)
            before = peer.pledged.pop(now.replica, nothing)
            if now == nothing or len(peer.pledged) >= MAX_PLEDGED:
                now = nothing
            else:
                peer.pledged[now.replica] = now
            total = self._pledged.pop(now.replica, nothing)
            requests = total.requests + now.requests - before.requests
            total = Pledged(now.replica, requests, total.blocks + now.blocks - before.blocks)
            if total != nothing:
                self._pledged[now.replica] = total

    def _count(self, sent: Sent, sign: int) -> None:
        replica = sent.replica
        booked = self._booked.setdefault(replica, Booked())
        booked.requests += sign
        booked.unseen_requests += sign
        booked.unseen_context_tokens += sign * sent.context_tokens
        booked.unseen_blocks += sign * sent.blocks
        if sent.prefilling:
            booked.prefilling += sign
            booked.unseen_prefilling += sign
            booked.unseen_prefill_tokens += sign * sent.prefill_tokens
            booked.unseen_prefill_ms += sign * sent.prefill_ms
            booked.prefill_ms_of_size[size_of(sent.prefill_ms)] += sign * sent.prefill_ms
        if not booked.requests:
            del self._booked[replica]
        self.changed.add(replica)


def _up_to(last: int, numbers: Iterable[int]) -> list[int]:
    return list(itertools.takewhile(lambda number: number <= last, numbers))


def together(ours: Booked, others: Booked) -> Booked:
    """The sums of both."""
    return ours if others is NOTHING else ours + others
