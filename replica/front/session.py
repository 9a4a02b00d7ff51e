"""One router's link while it lasts: its frames in, one frame of deltas per engine step out.

Deltas wait in the mailboxes of their attempts, not here: the writer takes them when the socket has
room, so a slow link turns into full mailboxes, and those into held requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from events.errors import WireError
from events.output import FINISH_ABORT, CacheCleared, CoreDelta, ReplicaFrame, StepFrame
from events.request import Abort, ClearCache, CoreRequest, Hold, LinkHello, Resume, RouterFrame
from events.wire import decode_router_frame, encode
from replica.engine.messages import Engine
from replica.front.attempts import Attempt, AttemptKey, Attempts, HoldReason
from replica.front.intake import Intake
from replica.front.metrics import FrontCounters

log = logging.getLogger(__name__)

FRAME_BYTES = 1024 * 1024
"""A frame takes deltas until it holds about this much."""

MAX_ANSWERS = 256
"""Refusals and other answers that may wait; beyond it the link's frames are not read."""

MAX_CLEARING = 4
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that a session works on."""

    engine: Engine
    attempts: Attempts
    intake: Intake
    counters: FrontCounters


class LinkSession:
    """The outlet of its attempts; ends all of them when it ends.

    `stall_s`: a send that takes longer than this ends the link.
    """

    def __init__(self, socket: web.WebSocketResponse, front: Front, stall_s: float) -> None:
        self._socket = socket
        self._front = front
        self._stall_s = stall_s
        self._answers: deque[ReplicaFrame] = deque()
        self._ready: dict[Attempt, None] = {}
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._clearing: set[asyncio.Task[None]] = set()

    def wake(self, attempt: Attempt) -> None:
        """Deltas lie in the attempt's mailbox."""
        self._ready[attempt] = None
        self._work.set()

    async def run(self) -> None:
        """Serve until the socket closes, a frame is malformed, or the router stops reading."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost = self._front.attempts.drop_outlet(self)
            if lost:
                log.warning("a link ended with %d live requests", lost)
            tasks = (reader, writer, *self._clearing)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("a link failed: %s", type(result).__name__)

    async def close(self) -> None:
        """End the link from this side; one that doesn't take the goodbye is left to the server."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=WSCloseCode.GOING_AWAY)

    async def _read(self) -> None:
        async for message in self._socket:
            if not self._accept(message.type, message.data):
                self._front.counters.malformed_frames += 1
                return
            while len(self._answers) >= MAX_ANSWERS:
                self._room.clear()
                await self._room.wait()

    def _accept(self, kind: WSMsgType, data: object) -> bool:
        """Heed one message; False when the link can't be trusted any further."""
        if kind is not WSMsgType.BINARY or not isinstance(data, bytes):
            return False
        try:
            return self._heed(decode_router_frame(data))
        except WireError:
            return False

    def _heed(self, frame: RouterFrame) -> bool:
        match frame:
            case CoreRequest():
                refusal = self._front.intake.submit(self, frame)
                if refusal:
                    self._answer(StepFrame(deltas=refusal))
            case Abort() | Hold() | Resume():
                self._steer(frame)
            case ClearCache():
                return self._clear(frame)
            case LinkHello():
                return False
        return True

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
        self._work.set()

    async def _write(self) -> None:
        try:
            while True:
                self._work.clear()
                while (frame := self._next_frame()) is not None:
                    async with asyncio.timeout(self._stall_s):
                        await self._socket.send_bytes(encode(frame))
                await self._work.wait()
        except (TimeoutError, ConnectionError):
            return

    def _next_frame(self) -> ReplicaFrame | None:
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
        del self._ready[attempt]
        if len(mailbox):
            self._ready[attempt] = None
        self._front.attempts.taken(attempt)
        return before - mailbox.bytes
