"""A CoreError as OpenAI's error: HTTP status, headers and body."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import msgspec

from events.errors import CoreError

SERVER_ERROR = CoreError(
    status=500,
    message="The server had an error while processing your request.",
    type="server_error",
)
"""What a client sees of an error that nobody expected."""

_RETRYABLE = (429, 503)
RETRY_MS = "retry-after-ms"
"""OpenAI's clients prefer it: finer than whole seconds. They add no spread of their own to what a
server says: all of it is put on here, on every answer that asks to come again."""

SPREAD_S, SPREAD_RATIO = 1.0, 0.5
HONOURED_S = 60.0
"""OpenAI's older clients take no longer wait for one, and come back within seconds."""
_rng = random.Random()


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct, frozen=True):
    error: _Error


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Ready for the wire; `headers` always name the content type."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_body(error: CoreError) -> bytes:
    """{"error": {message, type, param, code}} as JSON."""
    return msgspec.json.encode(_Body(_Error(error.message, error.type, error.param, error.code)))


def _retry_after_s(error: CoreError) -> int | None:
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if error.status in _RETRYABLE else None


def _spread_ms(wait_s: int) -> int:
    spread_s = max(SPREAD_S, SPREAD_RATIO * wait_s)
    if wait_s <= HONOURED_S:
        spread_s = min(spread_s, HONOURED_S - wait_s)
    return int(1e3 * (wait_s + _rng.uniform(0.0, spread_s)))


def to_response(error: CoreError) -> ErrorResponse:
    """The whole answer to a request that failed before its first byte."""
    headers = {"Content-Type": "application/json"}
    wait_s = _retry_after_s(error)
    if wait_s is not None:
        wait_ms = _spread_ms(wait_s)
        headers["Retry-After"] = str(round(wait_ms / 1e3))
        headers[RETRY_MS] = str(wait_ms)
    return ErrorResponse(error.status, headers, error_body(error))
