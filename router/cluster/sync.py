"""Telling the other routers what was just sent where, and hearing it from them.

One message per tick while there is something to tell and somebody to tell it to; the whole state
every few seconds, when asked for, and in place of a message that would be too long. Whatever the
bus loses costs even spreading for a moment, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from events.bus import Bus, Subscription
from events.envelope import MAX_BUS_MESSAGE_BYTES, seal, unseal
from events.errors import WireError
from events.load import OWN_ENGINE
from events.peer import PeerAsk, PeerDelta, PeerMessage, PeerState, Sent, Used
from events.subjects import router_subject, split
from events.wire import decode
from router.choice.choose import RouterBrain
from router.choice.reserve import Reservation
from router.cluster.peers import GONE_S, MAX_OPEN, Peers
from router.cluster.use import SharedUse
from router.fleet.fleet import Fleet
from router.serving.http import log_unexpected
from router.split.quota import DecodeQuota

KIND = "peers"
TICK_S = 0.005
STATE_S = 2.0
ASKED_GAP_S = 0.1
"""However many ask, and however often something is missing."""

MAX_CHANGES = 4_096
MAX_MARKS_BYTES = 256 * 1024
"""In one message; beyond it dispatches are told without them."""

TWIN = "router_id_taken"

_messages: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


class Changes:
    """The ledger's journal since the last message, kept while `peers` has somebody to tell. What
    came and went meanwhile is not in it."""

    def __init__(self, peers: Peers, wake: Callable[[], None]) -> None:
        self._peers = peers
        self._wake = wake
        self.clear()

    def __len__(self) -> int:
        return len(self.sent) + len(self.past_prefill) + len(self.ended)

    def clear(self) -> None:
        """They are told."""
        self.sent: dict[int, Reservation] = {}
        self.past_prefill: list[int] = []
        self.ended: list[int] = []

    def reserved(self, reservation: Reservation) -> None:
        """It was made."""
        if self._peers.alone:
            return
        self.sent[reservation.dispatch_seq] = reservation
        self._wake()

    def prefilled(self, reservation: Reservation) -> None:
        """Its prefill is over; what reports include needs no telling."""
        new = reservation.dispatch_seq in self.sent
        if not self._peers.alone and reservation.unseen and not new:
            self.past_prefill.append(reservation.dispatch_seq)
            self._wake()

    def released(self, reservation: Reservation) -> None:
        """It is over."""
        new = self.sent.pop(reservation.dispatch_seq, None) is not None
        if not self._peers.alone and reservation.unseen and not new:
            self.ended.append(reservation.dispatch_seq)
            self._wake()


class PeerSync:
    """The bus side of `brain.peers`, `brain.ledger` and the pledges of `quota` for one life of one
    router."""

    def __init__(
        self,
        bus: Bus,
        cluster: str,
        router_id: str,
        boot: int,
        brain: RouterBrain,
        use: SharedUse,
        quota: DecodeQuota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.told = 0
        self.malformed = 0
        self._bus = bus
        self._pattern = router_subject(cluster, "*", KIND)
        self._subject = router_subject(cluster, router_id, KIND)
        self._id, self._boot = router_id, boot
        self._boot_name = brain.router_boot
        self._fleet: Fleet = brain.fleet
        self._peers, self._ledger = brain.peers, brain.ledger
        self._clock = clock
        self._work = asyncio.Event()
        self._changes = Changes(self._peers, self._work.set)
        self._ledger.journal = self._changes
        self._use, self._quota = use, quota
        use.on_work(self._wake)
        quota.on_work(self._wake)
        self._seq = 0
        self._asking = True
        self._asked = True
        self._next_ask_s = self._next_state_s = self._answer_from_s = float("-inf")
        self._twin_heard_s: float | None = None
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, tell our state, and ask for everybody's."""
        self._subscription = await self._bus.subscribe(self._pattern, self._receive)
        self._bus.on_gap(self._on_gap)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Fall silent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.close()

    async def _run(self) -> None:
        while True:
            try:
                await self.tick()
            except Exception as error:
                log_unexpected(error)
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._work.wait()

    def _pause_s(self) -> float:
        """Until something is due by time alone."""
        due_s = self._next_state_s
        if self._asked:
            due_s = min(due_s, self._answer_from_s)
        if self._asking:
            due_s = min(due_s, self._next_ask_s)
        return max(0.0, due_s - self._clock())

    async def tick(self) -> None:
        """Say what is due now."""
        now_s = self._clock()
        self._work.clear()
        self._peers.expire(now_s)
        self._watch_twin(now_s)
        if self._asking and now_s >= self._next_ask_s:
            self._asking, self._next_ask_s = False, now_s + ASKED_GAP_S
            await self._publish(PeerAsk())
        message = self._next_message(now_s)
        self._changes.clear()
        if message is not None:
            self._seq += 1
            self.told += 1
            await self._publish(message)

    def _next_message(self, now_s: float) -> PeerDelta | PeerState | None:
        delta = self._delta()
        answering = self._asked and now_s >= self._answer_from_s
        if answering or now_s >= self._next_state_s or len(self._changes) > MAX_CHANGES:
            self._asked, self._answer_from_s = False, now_s + ASKED_GAP_S
            self._next_state_s = now_s + STATE_S
            return self._state(delta.used)
        return None if self._peers.alone or delta == PeerDelta() else delta

    def _wake(self) -> None:
        if not self._peers.alone:
            self._work.set()

    async def _publish(self, message: PeerMessage) -> None:
        await self._bus.publish(self._subject, seal(self._id, self._boot, 0, self._seq, message))

    def _state(self, used: tuple[Used, ...]) -> PeerState:
        for replica in {one.replica for one in self._ledger.unseen()}:
            member = self._fleet.member(replica)
            if member is not None and member.load is not None:
                self._ledger.note_seen(replica, member.load.seen.get(self._boot_name, 0))
        newest = sorted(self._ledger.unseen(), key=lambda one: one.dispatch_seq)[-MAX_OPEN:]
        told = (self._sent(one) for one in newest)
        bare = (msgspec.structs.replace(one, marks=b"") for one in told if one)
        return PeerState(tuple(bare), used, self._use.all_inside(), self._quota.all())

    def _delta(self) -> PeerDelta:
        """What has changed, all taken."""
        changes, use = self._changes, self._use
        sent = [one for one in map(self._sent, changes.sent.values()) if one is not None]
        if sum(len(one.marks) for one in sent) > MAX_MARKS_BYTES:
            sent = [msgspec.structs.replace(one, marks=b"") for one in sent]
        past, ended = tuple(changes.past_prefill), tuple(changes.ended)
        told = use.take(), use.take_inside(), self._quota.take()
        return PeerDelta(tuple(sent), past, ended, *told)

    def _sent(self, one: Reservation) -> Sent | None:
        member = self._fleet.member(one.replica)
        if member is None:
            return None
        return Sent(
            one.dispatch_seq,
            one.replica,
            member.boot,
            one.prefill_tokens,
            one.prefill_ms,
            one.context_tokens,
            one.blocks,
            one.prefilling,
            one.marks,
        )

    def _receive(self, subject: str, payload: bytes) -> None:
        try:
            _, router, _ = split(subject)
            envelope = unseal(payload)
            if envelope.sender != router:
                raise WireError("a message under another one's subject")
            message = decode(_messages, bytes(envelope.payload), MAX_BUS_MESSAGE_BYTES)
        except (WireError, ValueError):
            self.malformed += 1
            return
        now_s = self._clock()
        if router == self._id:
            if envelope.boot != self._boot:
                self._twin_heard_s = now_s
        elif isinstance(message, PeerAsk):
            self._peers.greet(router, envelope.boot, now_s)
            self._asked = True
            self._work.set()
        else:
            if self._peers.fresh(router, envelope.boot, envelope.seq):
                self._use.hear(message.used)
            current = self._current(message)
            if not self._peers.hear(router, envelope.boot, envelope.seq, current, now_s):
                self._ask()

    def _current(self, message: PeerDelta | PeerState) -> PeerDelta | PeerState:
        """Without what went to lives of replicas that are known to be over."""
        if not any(map(self._over, message.sent)):
            return message
        sent = tuple(one for one in message.sent if not self._over(one))
        return msgspec.structs.replace(message, sent=sent)

    def _over(self, one: Sent) -> bool:
        member = self._fleet.member(one.replica)
        # Lives of other engines are counted by each router for itself.
        numbered = member is not None and member.hello.engine == OWN_ENGINE
        return numbered and one.replica_boot < member.boot

    def _ask(self) -> None:
        self._asking = True
        self._work.set()

    def _on_gap(self, _reason: str) -> None:
        """We may have missed something, and so may the others, of us."""
        self._peers.doubt()
        self._asked = True
        self._ask()

    def _watch_twin(self, now_s: float) -> None:
        heard_s = self._twin_heard_s
        if heard_s is None:
            return
        if now_s - heard_s > GONE_S:
            self._twin_heard_s = None
            self._fleet.alarms.clear(TWIN, self._id)
        elif not self._fleet.alarms.active(TWIN, self._id):
            self._fleet.alarms.raise_(TWIN, self._id, "another router speaks under this id")
