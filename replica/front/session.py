"""One router's session: its frames in, one frame of deltas per engine step out.

It outlives its connections, one at a time, for as long as the router comes back in time. Deltas
wait in the mailboxes of their attempts, not here: a connection takes them when its socket has room,
so a slow or broken one turns into full mailboxes, and those into held requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from events.errors import WireError
from events.output import FINISH_ABORT, CacheCleared, CoreDelta, ReplicaFrame, StepFrame
from events.request import Abort, ClearCache, CoreRequest, Hold, LinkHello, Resume, RouterFrame
from events.session import Ack, Incoming, Outgoing
from events.wire import decode_router_frame, encode
from replica.engine.messages import Engine
from replica.front.attempts import Attempt, AttemptKey, Attempts, HoldReason
from replica.front.intake import Intake
from replica.front.metrics import FrontCounters

log = logging.getLogger(__name__)

FRAME_BYTES = 1024 * 1024
"""A frame takes deltas until it holds about this much."""

KEPT_BYTES = 16 * 1024 * 1024
"""Sent frames that are kept until the router has acknowledged them."""

MAX_ANSWERS = 256
"""Refusals and other answers that may wait; beyond it the link's frames are not read."""

MAX_CLEARING = 4


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that a session works on."""

    engine: Engine
    attempts: Attempts
    intake: Intake
    counters: FrontCounters


class LinkSession:
    """The outlet of its attempts; `end` aborts all of them."""

    def __init__(self, name: str, front: Front) -> None:
        self.name = name
        self.work = asyncio.Event()
        self.outgoing = Outgoing(KEPT_BYTES)
        self.incoming = Incoming()
        self.ack_due = False
        self._front = front
        self._answers: deque[ReplicaFrame] = deque()
        self._ready: dict[Attempt, None] = {}
        self._room = asyncio.Event()
        self._clearing: set[asyncio.Task[None]] = set()

    def wake(self, attempt: Attempt) -> None:
        """Deltas lie in the attempt's mailbox."""
        self._ready[attempt] = None
        self.work.set()

    def accept(self, data: bytes) -> bool:
        """Heed one frame; False when the link can't be trusted any further."""
        try:
            return self._heed(decode_router_frame(data))
        except WireError:
            return False

    @property
    def counters(self) -> FrontCounters:
        """The front's."""
        return self._front.counters

    async def readable(self) -> None:
        """Until there is room for the answer to one more frame."""
        while len(self._answers) >= MAX_ANSWERS:
            self._room.clear()
            await self._room.wait()

    def next_frame(self) -> bytes | None:
        """The frame to send now, if there is one; kept until it is acknowledged."""
        frame = self.outgoing.next()
        if frame is None and (fresh := self._fresh_frame()) is not None:
            self.outgoing.add(encode(fresh))
            frame = self.outgoing.next()
        return frame

    def end(self) -> None:
        """Nobody comes back for it."""
        lost = self._front.attempts.drop_outlet(self)
        self._ready.clear()  # they know us: what holds itself stays until the collector comes by
        if lost:
            log.warning("a link ended with %d live requests", lost)
        for task in self._clearing:
            task.cancel()

    def _heed(self, frame: RouterFrame) -> bool:
        match frame:
            case Ack():
                self.outgoing.acknowledge(frame.received)
                return True
            case CoreRequest():
                refusal = self._front.intake.submit(self, frame)
                if refusal:
                    self._answer(StepFrame(deltas=refusal))
            case Abort() | Hold() | Resume():
                self._steer(frame)
            case ClearCache():
                if not self._clear(frame):
                    return False
            case LinkHello():
                return False
        self._count()
        return True

    def _count(self) -> None:
        if self.incoming.note():
            self.ack_due = True
            self.work.set()

    def _steer(self, frame: Abort | Hold | Resume) -> None:
        attempts = self._front.attempts
        attempt = attempts.find(AttemptKey(self, frame.request_id, frame.attempt))
        if attempt is None:
            return
        match frame:
            case Abort():
                attempts.end(attempt, FINISH_ABORT)
            case Hold():
                attempts.hold(attempt, HoldReason.ROUTER)
            case Resume():
                attempts.resume(attempt, HoldReason.ROUTER)

    def _clear(self, frame: ClearCache) -> bool:
        limit_blocks = frame.limit_blocks
        if len(self._clearing) >= MAX_CLEARING or (limit_blocks is not None and limit_blocks < 1):
            return False
        task = asyncio.create_task(self._clear_cache(frame))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        return True

    async def _clear_cache(self, frame: ClearCache) -> None:
        try:
            # The engine answers between two steps: a thread waits for it.
            blocks = await asyncio.to_thread(self._front.engine.clear_cache, frame.limit_blocks)
        except Exception as error:
            log.error("the cache was not cleared: %s", type(error).__name__)
            return
        self._answer(CacheCleared(command_id=frame.command_id, blocks=blocks))

    def _answer(self, frame: ReplicaFrame) -> None:
        self._answers.append(frame)
        self.work.set()

    def _fresh_frame(self) -> ReplicaFrame | None:
        if self._answers:
            self._room.set()
            return self._answers.popleft()
        deltas: list[CoreDelta] = []
        room = FRAME_BYTES
        while self._ready and room > 0:
            attempt = next(iter(self._ready))
            room -= self._take(attempt, room, deltas)
        return StepFrame(deltas=tuple(deltas)) if deltas else None

    def _take(self, attempt: Attempt, room: int, deltas: list[CoreDelta]) -> int:
        """Move deltas from a mailbox into a frame; what stays there waits at the line's end."""
        mailbox = attempt.mailbox
        before = mailbox.bytes
        deltas += mailbox.take(room)
        freed_bytes = before - mailbox.bytes
        del self._ready[attempt]
        if len(mailbox):
            self._ready[attempt] = None
        self._front.attempts.taken(attempt, freed_bytes)
        return freed_bytes
