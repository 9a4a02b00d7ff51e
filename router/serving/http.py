"""What every route shares: ids, errors in OpenAI's shape, counting, and the log that stays silent
about content."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Awaitable, Callable

from aiohttp import web

from events.errors import CoreError, UserError
from router.openai.errors import SERVER_ERROR, to_response
from router.randomness import random_bytes
from router.serving.plain import PlainRequest, StreamAnswer, WholeAnswer
from router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
REQUEST_ID = web.RequestKey("request_id", str)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Request = web.BaseRequest | PlainRequest
Answer = web.StreamResponse | StreamAnswer | WholeAnswer
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GeneratingHandler = Callable[[Request], Awaitable[Answer]]


def error_response(error: CoreError) -> web.Response:
    """A CoreError as the whole answer."""
    answer = to_response(error)
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def log_unexpected(error: BaseException) -> None:
    """Where it happened and what kind it is; never its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " > ".join(f"{frame.name}:{frame.lineno}" for frame in frames[-8:])
    log.error("unexpected %s at %s", type(error).__name__, places)


def _http_error(error: web.HTTPException) -> CoreError:
    """What aiohttp itself refuses."""
    if error.status == 404:
        message, code = "Unknown request URL. Please check the URL for typos.", "unknown_url"
    elif error.status == 405:
        message, code = "This method is not allowed here.", "method_not_supported"
    elif error.status == 413:
        message, code = "The request's body is too large.", "request_too_large"
    else:
        message, code = error.reason or "The request can't be served.", None
    return CoreError(status=error.status, message=message, code=code)


def read_at_once(request: Request) -> bytes | None:
    """The body where all of it came with the head; None where it has to be waited for, or is
    refused: read_body says why."""
    if isinstance(request, PlainRequest):
        return request.body
    content = request.content
    if (
        not content.is_eof()
        or content.total_bytes > request.client_max_size
        or "Content-Encoding" in request.headers
        or content.exception() is not None
    ):
        return None
    return content.read_nowait()


async def read_body(request: Request) -> bytes:
    """The whole body. Raises UserError: 413 over the bound, 408 when it comes too slowly, 415 when
    it is compressed, 400 when its framing is broken."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        message = "compressed bodies are not supported"
        raise UserError(CoreError(status=415, message=message, code="unsupported_encoding"))
    try:
        if (request.content_length or 0) > request.client_max_size:
            # Said at once: the bytes may never come.
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length)
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        message = "the request's body did not arrive in time"
        raise UserError(CoreError(status=408, message=message, code="timeout")) from None
    except web.HTTPRequestEntityTooLarge as error:
        raise UserError(_http_error(error)) from None
    except web.RequestPayloadError:
        message = "the request's body is broken"
        raise UserError(CoreError(status=400, message=message)) from None


def route_of(request: web.Request) -> str:
    """The route's template: a label from a fixed set."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def request_id(request: Request) -> str:
    """The id that this gateway minted for the request."""
    return request[REQUEST_ID]


def error_middleware(metrics: Metrics) -> Callable[[web.Request, Handler], Awaitable]:
    """Mints the id, turns every failure into an answer, counts what was answered."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        mint_id(request)
        status = 499
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception as error:
            response = failure(error)
            status = response.status
            return response
        finally:
            metrics.answered(route_of(request), status)

    return middleware


def mint_id(request: Request) -> None:
    """Ours, for logs and answers."""
    request[REQUEST_ID] = f"req-{random_bytes(12).hex()}"


def failure(error: Exception) -> web.Response:
    """What is said of a handler's failure."""
    if isinstance(error, UserError):
        return error_response(error.error)
    if isinstance(error, web.HTTPException):
        response = error_response(_http_error(error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    log_unexpected(error)
    return error_response(SERVER_ERROR)


def id_headers(request: Request) -> dict[str, str]:
    """`x-request-id` echoes a harmless client id, else it is ours."""
    ours = request.get(REQUEST_ID, "")
    given = request.headers.get("x-request-id")
    echoed = given if given is not None and _CLIENT_ID.fullmatch(given) else ours
    return {"x-request-id": echoed, "x-warmroute-request": ours}


async def add_ids(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler."""
    response.headers.update(id_headers(request))
