"""The door for routers: `GET /link` becomes a WebSocket that must introduce itself at once.

A router whose connection broke may come back for its session. Whoever begins another one under the
same boot, or does not come back in time, has given up all that the old one served.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from events.errors import WireError
from events.output import LinkWelcome
from events.request import LINK_VERSION, MAX_LINK_FRAME_BYTES, LinkHello
from events.session import RESUME_S
from events.wire import decode_router_frame, encode
from replica.front.connection import CLOSE_S, Connection, Ending
from replica.front.session import Front, LinkSession

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


class _Guest:
    """A session, the connection that serves it now, and until when it is kept without one."""

    def __init__(self, session: LinkSession) -> None:
        self.session = session
        self.connection: Connection | None = None
        self.leaving: asyncio.TimerHandle | None = None


class LinkServer:
    """Accepts links and keeps the sessions that are open, or may be resumed."""

    def __init__(self, front: Front, settings: LinkSettings) -> None:
        self._front = front
        self._settings = settings
        self._doors = 0
        self._guests: set[_Guest] = set()
        self._by_boot: dict[str, _Guest] = {}

    def __len__(self) -> int:
        return sum(guest.connection is not None for guest in self._guests)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The handler of `/link`; returns when the connection has ended."""
        if self._doors >= MAX_LINKS:
            self._front.counters.refuse_link("too_many")
            return web.Response(status=503, headers={"Retry-After": "1"})
        self._doors += 1
        try:
            return await self._open(request)
        finally:
            self._doors -= 1

    async def close(self) -> None:
        """End every session."""
        open_ones = [guest.connection for guest in self._guests if guest.connection is not None]
        await asyncio.gather(*(connection.close() for connection in open_ones))
        for guest in list(self._guests):
            self._end(guest)

    async def _open(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=self._settings.heartbeat_s,
            max_msg_size=MAX_LINK_FRAME_BYTES,
            timeout=CLOSE_S,
            compress=False,
        )
        await socket.prepare(request)
        try:
            hello = await self._introduction(socket)
            await self._serve(hello, socket, request)
        except LinkRefusedError as error:
            self._front.counters.refuse_link(str(error))
        except ConnectionError:
            pass
        await self._shut(socket, request)
        if (broken := socket.exception()) is not None:
            broken.__traceback__ = None  # its frames hold the socket, which holds it
        return socket

    def _welcome(self, session: LinkSession, resumed: bool) -> LinkWelcome:
        settings = self._settings
        return LinkWelcome(
            version=LINK_VERSION,
            replica=settings.replica,
            boot=settings.boot,
            continues=True,
            resumes=bool(session.name),
            received=session.incoming.received if resumed else None,
        )

    async def _introduction(self, socket: web.WebSocketResponse) -> LinkHello:
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
        return hello

    async def _serve(
        self, hello: LinkHello, socket: web.WebSocketResponse, request: web.Request
    ) -> None:
        guest, resumed = await self._guest(hello)
        connection = guest.connection = Connection(socket, request, self._settings.stall_s)
        ending = Ending.BROKEN
        try:
            await socket.send_bytes(encode(self._welcome(guest.session, resumed)))
            ending = await connection.run(guest.session)
        finally:
            guest.connection = None
            if ending is Ending.BROKEN and hello.session:
                self._keep(guest)
            else:
                self._end(guest)

    def _keep(self, guest: _Guest) -> None:
        """For a while, and not for too many."""
        if guest not in self._guests or len(self._guests) > MAX_LINKS:
            self._end(guest)
            return
        loop = asyncio.get_running_loop()
        guest.leaving = loop.call_later(RESUME_S, self._end, guest)

    async def _guest(self, hello: LinkHello) -> tuple[_Guest, bool]:
        """The session that the hello asks for, and whether it goes on; an older one of the same
        router boot ends here."""
        old = self._by_boot.get(hello.router_boot) if hello.session else None
        if old is not None:
            while old.connection is not None:
                await old.connection.cut()
            if self._resume(old, hello):
                return old, True
            self._end(old)
        guest = _Guest(LinkSession(hello.session, self._front))
        self._guests.add(guest)
        if hello.session:
            self._by_boot[hello.router_boot] = guest
        return guest, False

    def _resume(self, guest: _Guest, hello: LinkHello) -> bool:
        if guest not in self._guests or hello.received is None:
            return False
        if guest.session.name != hello.session or not guest.session.outgoing.rewind(hello.received):
            return False
        if guest.leaving is not None:
            guest.leaving.cancel()
            guest.leaving = None
        return True

    def _end(self, guest: _Guest) -> None:
        """Idempotent."""
        if guest not in self._guests:
            return
        self._guests.remove(guest)
        self._by_boot = {boot: other for boot, other in self._by_boot.items() if other is not guest}
        if guest.leaving is not None:
            guest.leaving.cancel()
        guest.session.end()

    async def _shut(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        """Say goodbye; a peer that doesn't take it is cut off."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await socket.close(code=WSCloseCode.POLICY_VIOLATION)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
