"""Answers of backends on their way to the client: bytes, as they come, with back-pressure.

Before the first byte a failure is given back to the run, which may ask another replica of either
kind. After it nothing can be repaired: the client's stream breaks visibly, never ends cleanly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from msgspec import Struct

from configs.schema import RouterConfig
from events.errors import CoreError, UserError
from router.backends.attempt import ForeignAttempt
from router.backends.body import rewrite
from router.backends.client import BackendClient
from router.backends.events import Events
from router.backends.join import Seat
from router.backends.refusal import (
    ALARMS,
    callers_mistake,
    names_salt,
    refused,
    salt_refused,
    unreadable,
)
from router.backends.tail import Tail
from router.dispatch.failover import Run
from router.errors import AttemptError, transport_failure
from router.openai.stream import error_event
from router.serving.http import Answer, Request
from router.serving.sse import KEEP_ALIVE, EventWriter, Outbox, ReaderGoneError
from router.telemetry.alarms import Alarms
from router.telemetry.metrics import Metrics

MAX_ERROR_BYTES = 256 * 1024


class RelayCall(Struct, frozen=True):
    """What goes out: the client's own body, to the same path. `tag` keeps the tenant's blocks apart
    from others'. `wants_usage`: the client asked for the usage event of its stream."""

    path: str
    body: bytes
    request_id: str
    tag: str
    stream: bool
    wants_usage: bool

    def salt(self, seat: Seat) -> str | None:
        """What keeps the tenant's blocks apart at this backend; None where it takes no such."""
        return self.tag if seat.backend.config.cache_salt else None

    def for_backend(self, seat: Seat) -> bytes:
        """The body as this backend gets it."""
        asks_usage = self.stream and not self.wants_usage
        return rewrite(self.body, seat.backend.model, self.salt(seat), asks_usage)

    def headers(self, attempt: int) -> dict[str, str]:
        """Of the request upstream: nothing of the client's own."""
        return {
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if self.stream else "application/json",
            "X-Request-Id": f"{self.request_id}-{attempt}",
        }


class Relay:
    """Keeps nothing of a request beyond its end."""

    def __init__(
        self,
        seats: Mapping[str, Seat],
        clients: Mapping[str, BackendClient],
        settings: RouterConfig,
        metrics: Metrics,
        alarms: Alarms,
    ) -> None:
        self._alarms = alarms
        self._seats = seats
        self._clients = clients
        self._settings = settings
        self._metrics = metrics
        self._outbox = Outbox()

    async def answer(
        self, request: Request, call: RelayCall, run: Run, headers: Mapping[str, str]
    ) -> Answer | None:
        """The whole answer of the backend that `run` has chosen; None when it failed before its
        first byte and the run may choose again. Raises UserError when it may not."""
        attempt = run.attempt
        assert isinstance(attempt, ForeignAttempt)
        seat = self._seats[attempt.decision.replica]
        writer = EventWriter(request, self._outbox, self._settings.slow_reader_s)
        passage = _Passage(seat, attempt, run, writer, headers, self._settings.keepalive_s)
        try:
            with seat.carrying(attempt):
                response = await passage.carry(self._clients[seat.backend.id], call)
            if attempt.answered:
                for name in ALARMS:
                    self._alarms.clear(name, seat.backend.id)
            if passage.failed:
                self._metrics.stream_error(attempt.status)
            return response
        except AttemptError as failure:
            if failure.error.code in ALARMS:
                self._alarms.raise_(failure.error.code, seat.backend.id, failure.error.message)
            if not writer.response.prepared:
                run.give_up_or_retry(failure)
                return None
            attempt.fail(failure)
            await self._break(writer, passage, failure.kind, failure.error)
        except UserError as error:
            if not writer.response.prepared:
                raise
            await self._break(writer, passage, attempt.status, error.error)
        except ReaderGoneError as error:
            attempt.finish("client_gone")
            self._metrics.stream_error(error.reason)
        return writer.response

    async def _break(
        self, writer: EventWriter, passage: _Passage, kind: str, error: CoreError
    ) -> None:
        self._metrics.stream_error(kind)
        await writer.fail([error_event(error)] if passage.takes_events else [])


class _Passage:
    """One answer on its way."""

    def __init__(
        self,
        seat: Seat,
        attempt: ForeignAttempt,
        run: Run,
        writer: EventWriter,
        headers: Mapping[str, str],
        keepalive_s: float,
    ) -> None:
        self._seat = seat
        self._attempt = attempt
        self._run = run
        self._writer = writer
        self._headers = dict(headers)
        self._keepalive_s = keepalive_s
        self._tail: Events | Tail | None = None

    @property
    def takes_events(self) -> bool:
        """Whether an event of our own may follow."""
        return self._tail is not None and self._tail.keeps_alive

    @property
    def failed(self) -> bool:
        """Whether the server told of an error inside of its stream."""
        return self._tail is not None and self._tail.failed

    async def carry(self, client: BackendClient, call: RelayCall) -> Answer:
        """From request to last byte. Raises AttemptError, UserError, ReaderGoneError."""
        upstream = await self._ask(client, call)
        try:
            if upstream.status != 200:
                return await self._refusal(upstream, call)
            await self._pass_on(upstream, call)
        finally:
            # One that has not ended is cut: the engine stops at once.
            upstream.close()
        return self._writer.response

    async def _ask(self, client: BackendClient, call: RelayCall) -> aiohttp.ClientResponse:
        body = call.for_backend(self._seat)
        if not call.stream:
            self._attempt.expect_silence(self._seat.quiet)
        headers = call.headers(self._attempt.decision.attempt)
        try:
            async with self._attempt.wait_until(self._run.deadline_s()):
                return await client.post(call.path, body, headers)
        except TimeoutError:
            self._hangs()
            self._run.time_out()
        except (aiohttp.ClientError, OSError):
            raise transport_failure("the backend can't be reached") from None

    async def _refusal(self, upstream: aiohttp.ClientResponse, call: RelayCall) -> Answer:
        """A caller's mistake is the caller's to read. Raises AttemptError for everything else."""
        status = upstream.status
        if not callers_mistake(status):
            raise refused(status, upstream.headers.get("Retry-After", ""))
        try:
            async with self._attempt.wait_until(self._run.deadline_s()):
                body = await _head_of(upstream.content, MAX_ERROR_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            raise transport_failure("the backend broke off") from None
        if salt := call.salt(self._seat):
            if names_salt(body, call.body):
                raise salt_refused()
            body = body.replace(salt.encode(), b"...")
        self._attempt.finish("refused")
        headers = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
        return web.Response(status=status, body=body, headers=headers | self._headers)

    async def _pass_on(self, upstream: aiohttp.ClientResponse, call: RelayCall) -> None:
        events = upstream.content_type == "text/event-stream"
        drop_usage = events and call.stream and not call.wants_usage
        self._headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
        if not events and upstream.content_length is not None:
            self._headers["Content-Length"] = str(upstream.content_length)
        tail = self._tail = Events(drop_usage) if events else Tail(_measured(upstream))
        while (data := await self._read(upstream, tail)) != b"":
            if data is None:
                await self._write(KEEP_ALIVE)
                continue
            self._hear(events)
            if passed := tail.feed(data):
                await self._write(passed)
            if tail.broken:
                raise unreadable()
        await self._end(tail)

    async def _read(self, upstream: aiohttp.ClientResponse, tail: Events | Tail) -> bytes | None:
        """What came next, b"" at the end; None when it is time to show that we live."""
        loop = asyncio.get_running_loop()
        while True:
            wake_s, deadline_s = loop.time() + self._keepalive_s, self._run.deadline_s()
            try:
                async with self._attempt.wait_until(min(wake_s, deadline_s)):
                    return await upstream.content.readany()
            except TimeoutError:
                self._hangs()
                if deadline_s <= wake_s:
                    self._run.time_out()
                if tail.keeps_alive:
                    return None
            except (aiohttp.ClientError, OSError):
                raise transport_failure("the backend broke off") from None

    def _hangs(self) -> None:
        """Raises AttemptError where it was given up."""
        if self._attempt.given_up:
            raise transport_failure("the backend says nothing")

    def _hear(self, streaming: bool) -> None:
        self._attempt.heard(streaming)
        self._seat.heard()
        self._run.heard()

    async def _write(self, data: bytes) -> None:
        if not self._writer.response.prepared:
            self._run.delivered = True
            await self._writer.open(self._headers)
        if self._writer.free():
            self._writer.put(data)
        else:
            with self._attempt.held_up():
                await self._writer.write(data)

    async def _end(self, tail: Events | Tail) -> None:
        """The answer has ended: was it whole?"""
        rest = tail.rest()
        if tail.broken:
            raise unreadable()
        if not tail.complete:
            raise transport_failure("the backend's answer broke off")
        if rest:
            await self._write(rest)
        usage = tail.usage()
        if tail.failed:
            self._attempt.fail(refused(500))
        else:
            self._attempt.complete(usage)
        if usage is not None:
            self._run.grow(usage.completion_tokens)
            self._seat.learn(self._attempt, usage)
        await self._writer.close()


def _measured(upstream: aiohttp.ClientResponse) -> bool:
    """Whether it tells where its body ends."""
    chunked = "chunked" in upstream.headers.get("Transfer-Encoding", "").lower()
    return chunked or upstream.content_length is not None


async def _head_of(content: aiohttp.StreamReader, most_bytes: int) -> bytes:
    """However many parts it comes in."""
    parts: list[bytes] = []
    while most_bytes and (part := await content.read(most_bytes)):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)
