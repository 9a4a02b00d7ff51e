"""One connection of the HTTP library's, and what is refused on it before any route is known.

The HTTP library's own refusals are plain text and quote what came; these are in OpenAI's shape,
quote nothing, and close the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from events.errors import CoreError
from router.openai.errors import SERVER_ERROR
from router.serving.http import error_response, log_unexpected

MAX_LINE_BYTES = 8 * 1024
MAX_HEADER_BYTES = 16 * 1024
LINGER_S = 2.0
"""How long the rest of a refused body is still read, so that its sender sees the refusal."""

_quiet = logging.getLogger("router.aiohttp")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

_BAD_REQUEST = CoreError(status=400, message="This is not a valid HTTP request.")
_LONG_LINE = CoreError(status=414, message="The request's URL is too long.", code="url_too_long")
_LONG_HEADER = CoreError(
    status=431, message="The request's headers are too large.", code="headers_too_large"
)
_EXPECTATION = CoreError(
    status=417, message="Only 'Expect: 100-continue' is supported.", code="unsupported_expectation"
)

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def refusal(status: int, error: BaseException | None) -> CoreError:
    """What is said of an error that the HTTP library found."""
    if isinstance(error, LineTooLong):
        return _LONG_LINE if error.args[1] == MAX_LINE_BYTES else _LONG_HEADER
    if isinstance(error, BadHttpMessage) and error.message.startswith("Too many headers"):
        return _LONG_HEADER
    return SERVER_ERROR if status >= 500 else _BAD_REQUEST


def _closing(error: CoreError) -> web.Response:
    response = error_response(error)
    response.force_close()
    return response


def checked(handler: RequestHandler) -> RequestHandler:
    """`handler` behind the one check that the library makes before the middlewares."""

    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        expected = request.headers.get("Expect", "100-continue")
        return handler(request) if expected.lower() == "100-continue" else _refuse_expectation()

    return handle


async def _refuse_expectation() -> web.StreamResponse:
    return _closing(_EXPECTATION)


class Connection(web.RequestHandler):
    """The library's connection with our bounds and our refusals. `full`: its socket takes no more
    for now."""

    __slots__ = ("full",)

    def __init__(self, server: web.Server) -> None:
        self.full = False
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,
            logger=_quiet,
            auto_decompress=False,
            lingering_time=LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.full = False
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what no handler answered. Raises ConnectionError in mid-answer."""
        # "100 Continue" to a client that has left is an error to the library, and none of ours.
        if status >= 500 and exc is not None and not isinstance(exc, ConnectionError):
            log_unexpected(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        return _closing(refusal(status, exc))
