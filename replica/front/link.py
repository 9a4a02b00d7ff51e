"""The door for routers: `GET /link` becomes a WebSocket that must introduce itself at once."""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from events.errors import WireError
from events.output import LinkWelcome
from events.request import LINK_VERSION, MAX_LINK_FRAME_BYTES, LinkHello
from events.wire import decode_router_frame, encode
from replica.front.session import CLOSE_S, Front, LinkSession

log = logging.getLogger(__name__)

MAX_LINKS = 64


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """`secret` is what routers must present; the times end who is silent or doesn't read."""

    replica: str
    boot: int
    secret: str
    handshake_s: float = 5.0
    heartbeat_s: float = 15.0
    stall_s: float = 10.0


class LinkRefusedError(Exception):
    """The handshake failed; the text is one of ours."""


class LinkServer:
    """Accepts links and keeps those that are open."""

    def __init__(self, front: Front, settings: LinkSettings) -> None:
        self._front = front
        self._settings = settings
        self._doors = 0
        self._sessions: set[LinkSession] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The handler of `/link`; returns when the link has ended."""
        if self._doors >= MAX_LINKS:
            self._front.counters.refuse_link("too_many")
            return web.Response(status=503, headers={"Retry-After": "1"})
        self._doors += 1
        try:
            return await self._open(request)
        finally:
            self._doors -= 1

    async def close(self) -> None:
        """End every open link."""
        await asyncio.gather(*(session.close() for session in self._sessions))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=self._settings.heartbeat_s,
            max_msg_size=MAX_LINK_FRAME_BYTES,
            timeout=CLOSE_S,
            compress=False,
        )
        await socket.prepare(request)
        try:
            await self._introduction(socket)
            await socket.send_bytes(encode(self._welcome()))
            await self._serve(socket)
        except LinkRefusedError as error:
            self._front.counters.refuse_link(str(error))
        except ConnectionError:
            pass
        await self._shut(socket, request)
        return socket

    def _welcome(self) -> LinkWelcome:
        settings = self._settings
        return LinkWelcome(
            version=LINK_VERSION, replica=settings.replica, boot=settings.boot, continues=True
        )

    async def _introduction(self, socket: web.WebSocketResponse) -> None:
        """Wait for a good LinkHello. Raises LinkRefusedError."""
        try:
            message = await socket.receive(timeout=self._settings.handshake_s)
        except TimeoutError:
            raise LinkRefusedError("silent") from None
        if message.type is not WSMsgType.BINARY:
            raise LinkRefusedError("malformed")
        try:
            hello = decode_router_frame(message.data)
        except WireError:
            raise LinkRefusedError("malformed") from None
        if not isinstance(hello, LinkHello):
            raise LinkRefusedError("no_hello")
        if not hmac.compare_digest(hello.secret.encode(), self._settings.secret.encode()):
            raise LinkRefusedError("secret")
        if hello.version != LINK_VERSION:
            raise LinkRefusedError("version")

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        session = LinkSession(socket, self._front, self._settings.stall_s)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)

    async def _shut(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        """Say goodbye; a peer that doesn't take it is cut off."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await socket.close(code=WSCloseCode.POLICY_VIOLATION)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
