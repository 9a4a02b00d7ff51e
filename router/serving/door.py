"""Who may keep a connection open: at most so many, and none that asks for nothing for long.

The HTTP library has no such bounds of its own: a client that connects and stays silent, or sends
half a head, would be kept for ever.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

from aiohttp import web

from events.errors import CoreError
from router.openai.errors import to_response
from router.serving.connection import Connection, checked
from router.serving.express import Express, PlainHandler
from router.serving.http import Handler

IDLE_S = 75.0
SWEEP_S = 5.0
BACKLOG = 1_024
SPARE_CONNECTIONS = 256
"""Beyond the requests that are allowed: idle ones, and whoever asks for health."""

LINGER_S = 1.0
"""How long one that was refused is still read: hung up on at once, it would not see the answer."""

MAX_LINGERING = 256
RETRY_S = 1.0


def _refusal() -> bytes:
    """The whole answer to a connection too many."""
    answer = to_response(
        CoreError(
            status=503,
            message="too many connections at once",
            type="server_error",
            code="overloaded",
            retry_after_s=RETRY_S,
        )
    )
    said = answer.headers | {"Connection": "close", "Content-Length": str(len(answer.body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{lines}\r\n".encode() + answer.body


class _Refusal(asyncio.Protocol):
    """Says 503, then hangs up: when the client does, or after a while."""

    def __init__(self, said: bytes, lingering: set[_Refusal]) -> None:
        self._said = said
        self._lingering = lingering
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(self._said)
        if len(self._lingering) >= MAX_LINGERING:
            transport.close()
            return
        self._lingering.add(self)
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.close)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Door:
    """A protocol factory: each connection begins as an Express, and may become the library's. The
    middleware tells which of the latter are busy."""

    def __init__(
        self,
        limit: int,
        most_body_bytes: int,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = 0
        self.limit = limit
        self._idle_s = idle_s
        self._clock = clock
        self._lingering: set[_Refusal] = set()
        self._http: web.Server | None = None
        self._socket: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._idle_since_s: dict[asyncio.BaseProtocol, float] = {}
        self._most_body_bytes = most_body_bytes
        self._handlers: dict[str, PlainHandler] = {}
        self._express: set[Express] = set()

    def add_express(self, path: str, handler: PlainHandler) -> None:
        """Plain requests for exactly this path go to `handler` at once, past the application."""
        self._handlers[path] = handler

    async def open(
        self, http: web.Server, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen. Raises OSError when the address can't be used."""
        self._http = http
        http.request_handler = checked(http.request_handler)
        loop = asyncio.get_running_loop()
        self._socket = await loop.create_server(
            self._protocol, host, port, backlog=BACKLOG, ssl=tls
        )
        self._sweeper = asyncio.create_task(self._sweep_forever())

    async def close(self, grace_s: float) -> None:
        """Listen no more. The library's connections stay; of ours those that are answering have so
        much time."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for connection in list(self._express):
            connection.end()
        tasks = [of.task for of in self._express if of.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Open ones."""
        library = len(self._http.connections) if self._http is not None else 0
        return library + len(self._express)

    def idlest_s(self) -> float:
        """For how long the idlest connection has been so."""
        now_s = self._clock()
        return now_s - min(self._idle_since_s.values(), default=now_s)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._socket is not None
        return self._socket.sockets[0].getsockname()[:2]

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """While a request is being answered its connection is not idle."""
        self._idle_since_s.pop(request.protocol, None)
        try:
            return await handler(request)
        finally:
            self._idle_since_s[request.protocol] = self._clock()

    def came(self, connection: Express) -> None:
        """See Keeper."""
        self._express.add(connection)
        self.idle(connection)

    def busy(self, connection: Express) -> None:
        """See Keeper."""
        self._idle_since_s.pop(connection, None)

    def idle(self, connection: Express | Connection) -> None:
        """See Keeper."""
        self._idle_since_s[connection] = self._clock()

    def gone(self, connection: Express) -> None:
        """See Keeper."""
        self._express.discard(connection)
        self._idle_since_s.pop(connection, None)

    def library(self) -> Connection:
        """See Keeper."""
        assert self._http is not None
        connection = Connection(self._http)
        self.idle(connection)
        return connection

    def sweep(self) -> None:
        """Close what has been idle for too long, forget what is gone."""
        assert self._http is not None
        latest_s = self._clock() - self._idle_s
        self._forget_gone()
        for protocol, since_s in list(self._idle_since_s.items()):
            if since_s <= latest_s and protocol.transport is not None:
                protocol.transport.abort()

    def _protocol(self) -> asyncio.BaseProtocol:
        if self.connections >= self.limit:
            self.refused += 1
            return _Refusal(_refusal(), self._lingering)
        if len(self._idle_since_s) > 2 * self.limit:
            self._forget_gone()
        return Express(self._handlers, self._most_body_bytes, self)

    def _forget_gone(self) -> None:
        assert self._http is not None
        alive = {*self._http.connections, *self._express}
        self._idle_since_s = {p: s for p, s in self._idle_since_s.items() if p in alive}

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()
