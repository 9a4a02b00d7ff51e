"""One connection of a session: reads and writes its socket until one of both can't go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from enum import Enum, auto

from aiohttp import WSCloseCode, WSMsgType, web

from events.session import BEAT_S, SILENCE_S
from events.wire import encode
from replica.front.session import LinkSession

log = logging.getLogger(__name__)

CLOSE_S = 2.0
_LOST = (WSMsgType.CLOSED, WSMsgType.CLOSING)


class Ending(Enum):
    """BROKEN: the router may come back. CLOSED: it said goodbye, or is not to be trusted."""

    BROKEN = auto()
    CLOSED = auto()


class Connection:
    """`stall_s`: a send that takes longer than this ends it."""

    def __init__(self, socket: web.WebSocketResponse, request: web.Request, stall_s: float) -> None:
        self._socket = socket
        self._request = request
        self._stall_s = stall_s
        self._said_s = 0.0
        self._ended = asyncio.Event()
        self._ending = Ending.CLOSED

    async def run(self, session: LinkSession) -> Ending:
        """Serve the session until the socket breaks or closes, a frame is malformed, or the router
        stops reading."""
        work = (self._read(session), self._write(session), self._beat(session))
        tasks = [asyncio.create_task(part) for part in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("a link failed: %s", type(result).__name__)
            self._ended.set()
        return self._ending

    async def close(self) -> None:
        """End it from this side; one that doesn't take the goodbye is left to the server."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=WSCloseCode.GOING_AWAY)

    async def cut(self) -> None:
        """End it without a word: the router has come back on another one."""
        self.abort()
        await self._ended.wait()

    def abort(self) -> None:
        """Drop the connection."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _read(self, session: LinkSession) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is WSMsgType.CLOSE:
                return
            if message.type in _LOST or isinstance(message.data, OSError):
                self._ending = Ending.BROKEN
                return
            if message.type is not WSMsgType.BINARY or not session.accept(message.data):
                session.counters.malformed_frames += 1
                return
            await session.readable()

    async def _write(self, session: LinkSession) -> None:
        try:
            while True:
                session.work.clear()
                if session.ack_due:
                    session.ack_due = False
                    await self._send(encode(session.incoming.ack()), session)
                while (frame := session.next_frame()) is not None:
                    await self._send(frame, session)
                await session.work.wait()
        except ConnectionError:
            self._ending = Ending.BROKEN
        except TimeoutError:
            return

    async def _send(self, frame: bytes, session: LinkSession) -> None:
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(self._stall_s):
                await self._socket.send_bytes(frame)
        finally:
            self._said_s = time.monotonic()
            session.counters.socket_blocked_s += self._said_s - begun_s

    async def _beat(self, session: LinkSession) -> None:
        """Acknowledge what has come in, and give a sign of life. Only a named session's router
        knows the words."""
        while session.name:
            await asyncio.sleep(BEAT_S)
            if session.incoming.unsaid or time.monotonic() - self._said_s > SILENCE_S - BEAT_S:
                session.ack_due = True
                session.work.set()
        await asyncio.Event().wait()
