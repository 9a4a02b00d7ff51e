"""What a backend means that does not answer: who is to blame, and what the client may read of it.

A caller's mistake is the caller's to read. Everything else is about this gateway or the server: the
client sees no more than that another kind of server is behind us.
"""

from __future__ import annotations

from typing import Any

import msgspec

from events.errors import CoreError
from router.errors import ERROR, REFUSED, AttemptError

OURS_TO_ANSWER = (401, 403, 404, 407)
"""Refusals that are about this gateway's settings, not about the client's request."""

OF_OUR_KEY = (401, 407)
"""Those that every request would get."""

BUSY = (408, 425, 429)
SALT = "cache_salt"
"""The field of a request that the gateway adds."""

REFUSES_SALT = "salt_refused"
REFUSES_US = "backend_refuses"
ALARMS = (REFUSES_SALT, REFUSES_US)
"""Codes of errors that are also alarms, until the backend answers."""


def callers_mistake(status: int) -> bool:
    """Whether the status is about the request itself."""
    return 400 <= status < 500 and status not in OURS_TO_ANSWER and status not in BUSY


def refused(status: int, retry_after: str = "") -> AttemptError:
    """Not the caller's to mend."""
    ours, busy = status in OURS_TO_ANSWER, status in BUSY or status == 503
    once = status in BUSY or (ours and status not in OF_OUR_KEY)
    kind = REFUSED if once else ERROR
    return AttemptError(
        kind,
        CoreError(
            status=503 if busy else 502,
            message="the backend is busy" if busy else f"the backend answered with status {status}",
            type="server_error",
            code="backend_busy" if busy else REFUSES_US if ours else "backend_error",
            retry_after_s=_wait_s(retry_after) if busy else None,
        ),
    )


def unreadable() -> AttemptError:
    """An event came that nobody can read."""
    return _failure("the backend sent an event that is not JSON", "backend_error")


def salt_refused() -> AttemptError:
    """Asked again without it, one tenant could find out what another one has cached."""
    return _failure(
        "the backend refuses `cache_salt`, by which this gateway keeps its tenants' blocks apart: "
        "whoever runs it sets `cache_salt = false` for this backend (`warmroute up "
        "--no-cache-salt`) to share them",
        REFUSES_SALT,
    )


def names_salt(answer: bytes, asked: bytes) -> bool:
    """Whether a refusal is about the salt that we added to a client's body `asked`: by the field
    that it blames, or by its words, unless the client spoke of such a thing himself."""
    if SALT.encode() not in answer:
        return False
    try:
        told = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        told = None
    return _blames(told) or SALT.encode() not in asked


def _blames(told: Any) -> bool:
    """As OpenAI names a field (`param`), or as pydantic does (`loc`)."""
    if not isinstance(told, dict):
        return False
    error, details = told.get("error"), told.get("detail")
    if isinstance(error, dict) and error.get("param") == SALT:
        return True
    places = (
        [one.get("loc") for one in details or () if isinstance(one, dict)]
        if isinstance(details, list)
        else []
    )
    return any(isinstance(place, list) and SALT in place for place in places)


def _failure(message: str, code: str) -> AttemptError:
    return AttemptError(
        ERROR, CoreError(status=502, message=message, type="server_error", code=code)
    )


def _wait_s(retry_after: str) -> float:
    """As the server says it, where it says it in seconds."""
    known = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 4
    return max(1.0, float(retry_after)) if known else 1.0
