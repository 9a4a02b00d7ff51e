"""A client's connection while it asks nothing but plain requests of the generating routes.

The HTTP library's way to a handler (its parser's objects, two tasks, signals, a stream of the body)
costs as much as the choice of a replica. Here a plain head is read in one step, and its handler
runs in one task. Whatever else comes is given to the library with the connection, for good: what
it refuses, and how, is its business.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from aiohttp import web

from router.serving.connection import LINGER_S
from router.serving.http import Answer, log_unexpected
from router.serving.lane import written
from router.serving.plain import PlainRequest, WholeAnswer, head_of, read_head

MAX_UNREAD_BYTES = 128 * 1024
"""Of a body that nobody has asked for yet."""
MAX_BEHIND_BYTES = 16 * 1024
"""Of requests that came before the one ahead of them was answered."""

PlainHandler = Callable[[PlainRequest], Awaitable[Answer]]


class Keeper(Protocol):
    """Whose connections they are."""

    def came(self, connection: Express) -> None:
        """It is open."""

    def busy(self, connection: Express) -> None:
        """It has a request."""

    def idle(self, connection: Express) -> None:
        """It has none, or only the client's reading is left of it."""

    def gone(self, connection: Express) -> None:
        """It is closed, or another one's."""

    def library(self) -> asyncio.Protocol:
        """Who takes it from here."""


class Express(asyncio.Protocol):
    """One request at a time; what comes behind it waits: a little here, the rest in the socket.
    `full`: that takes no more for now.

    _request  _missing_bytes  it is
    None      0               idle: what comes is a head, or the library's
    set       above 0         answering while the body still comes
    set       0               answering; the body is whole
    None      above 0         lingering: a refused body is read, and forgotten
    """

    transport: asyncio.Transport

    def __init__(
        self, handlers: Mapping[str, PlainHandler], most_bytes: int, keeper: Keeper
    ) -> None:
        """`most_bytes`: of a body; the library refuses longer ones."""
        self.full = False
        self._handlers = handlers
        self._most_bytes = most_bytes
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._request: PlainRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = bytearray()
        self._missing_bytes = 0
        self._wanted = False
        self._behind = b""
        self._paused = False
        self._ending = False
        self._linger: asyncio.TimerHandle | None = None
        self._drain: asyncio.Future[None] | None = None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The answer that is under way."""
        return self._task

    def end(self) -> None:
        """No more requests: close once what is under way is answered."""
        self._ending = True
        if self._task is None:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self.transport = transport
        self._keeper.came(self)
        plug = transport.get_extra_info("socket")
        if plug is not None:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, _error: Exception | None) -> None:
        """See asyncio.Protocol. Whoever asked is gone: the answer is given up."""
        self._keeper.gone(self)
        if self._linger is not None:
            self._linger.cancel()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.full = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.full = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    async def drained(self) -> None:
        """Until the socket takes more."""
        if self.full:
            self._drain = self._loop.create_future()
            await self._drain

    def want_body(self) -> None:
        """Somebody waits for the rest of it."""
        self._wanted = True
        self._go_on_reading()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._missing_bytes:
            data = self._take_body(data)
        if data and not self.transport.is_closing():
            if self._request is None:
                self._begin(data)
            else:
                self._keep(data)

    def _begin(self, data: bytes) -> None:
        head = read_head(data, self._most_bytes)
        if head is None:
            self._hand_over(data)
            return
        request = self._request = PlainRequest(head, self._most_bytes, self)
        end = head.end + head.length
        self._wanted = False
        self._keeper.busy(self)
        if len(data) >= end:
            request.body = data[head.end : end]
        else:
            self._begun = bytearray(data[head.end :])
            self._missing_bytes = end - len(data)
        self._task = self._loop.create_task(self._answer(request))
        if len(data) > end:
            self._keep(data[end:])

    def _keep(self, data: bytes) -> None:
        """The next request, for later. Where reading stops, nobody notices a client that leaves."""
        self._behind += data
        if len(self._behind) > MAX_BEHIND_BYTES:
            self._stop_reading()

    def _take_body(self, data: bytes) -> bytes:
        """What is behind it."""
        part = data[: self._missing_bytes]
        self._missing_bytes -= len(part)
        if self._request is None:  # refused: read, and forgotten
            if not self._missing_bytes:
                self._next()
        else:
            self._begun += part
            if not self._missing_bytes:
                self._request.complete(bytes(self._begun))
                self._begun = bytearray()
            elif not self._wanted and len(self._begun) > MAX_UNREAD_BYTES:
                self._stop_reading()
        return data[len(part) :]

    def _hand_over(self, data: bytes) -> None:
        """To the library. It leaves one count of connections before it enters the other, so that
        the limit never sees it twice."""
        self._go_on_reading()
        self._keeper.gone(self)
        library = self._keeper.library()
        self.transport.set_protocol(library)
        library.connection_made(self.transport)
        library.data_received(data)

    async def _answer(self, request: PlainRequest) -> None:
        try:
            response = await self._handlers[request.path](request)
            # From here on the client's reading is waited for: the idle bound ends that.
            self._keeper.idle(self)
            if not response.prepared:
                self.transport.write(self._written(request, response))
                if self.full:
                    await self.drained()
        except ConnectionError:
            self.transport.abort()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception as error:
            log_unexpected(error)
            self.transport.abort()
        finally:
            self._task = self._request = None
        self._ended(request)

    def _written(self, request: PlainRequest, response: Answer) -> bytes:
        """All of an answer."""
        if isinstance(response, WholeAnswer):
            return written(request, response)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            response.headers["Content-Length"] = str(len(response.body))
            return head_of(response.status, response.headers, request.keep_alive) + response.body
        # A stream that never began: its reader was gone.
        raise ConnectionResetError("the client is gone")

    def _ended(self, request: PlainRequest) -> None:
        """The answer is written: what next?"""
        if self.transport.is_closing():
            return
        self._ending |= not request.keep_alive
        self._begun = bytearray()
        if self._missing_bytes:
            self._go_on_reading()
            self._linger = self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self._next()

    def _next(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._ending:
            self.transport.close()
            return
        data, self._behind = self._behind, b""
        self._go_on_reading()
        if data:
            self._begin(data)

    def _stop_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _go_on_reading(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()
