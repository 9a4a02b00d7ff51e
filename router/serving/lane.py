"""The short way of the generating routes: what all requests pass through, in one step.

The application's own way to a handler is a table of routes, a chain of middlewares, signals before
the head is written. Everything that it does for other routes is done here too.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_exceptions import ClientConnectionResetError
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11

from router.serving.http import Answer, GeneratingHandler, Request, failure, id_headers, mint_id
from router.serving.plain import SERVER_LINE, PlainRequest, WholeAnswer
from router.telemetry.metrics import Metrics
from router.tenancy.admit import limit_headers


def mark(request: Request, headers: MutableMapping[str, str]) -> None:
    """What every answer says: whose it is, and what is left of its tenant's limits."""
    headers.update(id_headers(request))
    headers.update(limit_headers(request))


class Lane:
    """A generating route, from the parsed head to its answer."""

    def __init__(self, route: str, handler: GeneratingHandler, metrics: Metrics) -> None:
        self._route = route
        self._handler = handler
        self._metrics = metrics

    async def __call__(self, request: PlainRequest) -> Answer:
        """The answer, marked unless its head is on its way. Counts it."""
        mint_id(request)
        status = 499
        try:
            response = await self._handler(request)
            if not (response.prepared or isinstance(response, WholeAnswer)):
                mark(request, response.headers)
            status = response.status
            return response
        except Exception as error:
            refused = failure(error)
            mark(request, refused.headers)
            status = refused.status
            return refused
        finally:
            self._metrics.answered(self._route, status)


def json_answer(request: Request, body: bytes, headers: Mapping[str, str]) -> Answer:
    """A whole answer, 200, as the request's connection takes it."""
    whole = WholeAnswer(body, headers)
    return whole if isinstance(request, PlainRequest) else _LibraryAnswer(whole)


class _LibraryAnswer(web.StreamResponse):
    """One that writes itself."""

    def __init__(self, whole: WholeAnswer) -> None:
        super().__init__()
        self._whole = whole

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write all of it. Raises ConnectionError."""
        if self.prepared:
            return self._payload_writer
        writer = request.writer
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        data = written(request, self._whole)
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client is gone")
        transport.write(data)
        writer.output_size += len(data)
        self._eof_sent = True
        if request.protocol.writing_paused:
            await writer.drain()
        return writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to be written."""


def written(request: Request, whole: WholeAnswer) -> bytes:
    """Head and body, marked."""
    version = request.version
    said = {**whole.headers, **id_headers(request), **limit_headers(request)}
    if (version >= HttpVersion11) != request.keep_alive:
        said["Connection"] = "keep-alive" if request.keep_alive else "close"
    lines = "".join([f"{name}: {value}\r\n" for name, value in said.items()])
    head = (
        f"HTTP/{version[0]}.{version[1]} 200 OK\r\n{lines}"
        f"Content-Type: application/json\r\nContent-Length: {len(whole.body)}\r\n"
        f"Date: {rfc822_formatted_time()}\r\n{SERVER_LINE}"
    )
    return head.encode() + whole.body
