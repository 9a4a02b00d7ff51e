"""Writing a stream of server-sent events to a client that may be slow, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aiohttp import web
from aiohttp.http import StreamWriter

from events.errors import WarmrouteError
from router.serving.connection import Connection
from router.serving.http import Request
from router.serving.lane import mark
from router.serving.plain import PlainRequest, StreamAnswer, Wire

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ReaderGoneError(WarmrouteError):
    """The client can't be written to; `reason` is "client_gone" or "slow_reader"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Outbox:
    """What was put into writers in one turn of the loop leaves at its end, one chunk a stream.

    The kernel's work for a socket drives ours out of the CPU's caches: 64 times each after the
    other is cheaper than 64 times both in turn. One per loop, shared by all its writers.
    """

    def __init__(self) -> None:
        self._writers: list[EventWriter] = []

    def add(self, writer: EventWriter) -> None:
        """Flush this one too, at the turn's end."""
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class EventWriter:
    """One response. A write that waits has a deadline; a stream that fails never ends cleanly."""

    def __init__(self, request: Request, outbox: Outbox, deadline_s: float) -> None:
        self.response: web.StreamResponse | StreamAnswer
        if isinstance(request, PlainRequest):
            self.response = StreamAnswer(request, HEADERS)
        else:
            self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._connection: Connection | Wire = request.protocol
        self._outbox = outbox
        self._deadline_s = deadline_s
        self._pending: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head. Raises ReaderGoneError."""
        self.response.headers.update(headers)
        mark(self._request, self.response.headers)
        try:
            writer = await self.response.prepare(self._request)
        except ConnectionError:
            raise ReaderGoneError("client_gone") from None
        if isinstance(writer, StreamWriter | StreamAnswer) and writer.chunked:
            self._transport = writer.transport

    def free(self) -> bool:
        """Whether `put` can be used now: chunks are framed by us, and the socket takes more."""
        transport = self._transport
        return not (transport is None or self._connection.full or transport.is_closing())

    def send(self, data: bytes) -> bool:
        """Write chunks that are framed already, behind what was flushed; whether more may come."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(data)
        return not self._connection.full

    @property
    def socket(self) -> int:
        """Its file where bytes reach the client as they are written there, else -1."""
        transport = self._transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return -1
        found = transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def idle(self) -> bool:
        """Whether all that was sent has left the process."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        return not (self._pending or transport.get_write_buffer_size())

    def put(self, data: bytes) -> None:
        """Send before the loop's turn ends, or before anything else; only while `free`."""
        if not self._pending:
            self._outbox.add(self)
        self._pending.append(data)

    def flush(self) -> None:
        """Send what was put."""
        pending, self._pending = self._pending, []
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        transport = self._transport
        if data and transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        """Send, waiting while the socket is full. Raises ReaderGoneError."""
        self.flush()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self.response.write(data)
        except TimeoutError:
            self._break_off(at_once=True)
            raise ReaderGoneError("slow_reader") from None
        except ConnectionError:
            raise ReaderGoneError("client_gone") from None

    async def close(self) -> None:
        """The clean end."""
        self.flush()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self.response.write_eof()
        except (TimeoutError, ConnectionError):
            self._break_off(at_once=True)

    async def fail(self, events: Sequence[bytes]) -> None:
        """The last event, then the connection breaks: no client can take it for a clean end."""
        self.flush()
        try:
            if self.response.prepared and events:
                await self.write(b"".join(events))
        except ReaderGoneError:
            return
        self._break_off(at_once=False)

    def _break_off(self, at_once: bool) -> None:
        transport = self._request.transport
        if transport is None:
            return
        if at_once:
            transport.abort()
        else:
            # What was written is still sent, the terminating chunk is not.
            transport.close()
