"""What can go wrong with messages.

WarmrouteError
  UserError        a caller's mistake; carries what an OpenAI error body needs
  InvariantError   a broken promise of our own; loud, never caught to go on silently
  WireError        bytes that are not the message they claim to be
  BusError         the bus can't be started or reached, or refuses us
"""

from __future__ import annotations

import msgspec

DRAINING = "draining"
"""The code of a replica that is shutting down."""

ENGINE_GONE = "engine_unavailable"
"""The code of a replica whose engine has stopped."""

QUEUE_LONGER = "queue_longer"
"""The code of a replica whose queue is far longer than the router believed."""


ADAPTER_LOAD_FAILED = "adapter_load_failed"
ADAPTER_NOT_FINITE = "adapter_not_finite"
"""The codes of what only a LoRA adapter is to blame for, never the replica."""


class CoreError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses processes; the gateway turns it into OpenAI's error body.

    `status` is the HTTP status. `reroute` says that another replica may be tried, because nothing
    of the request was executed here.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    reroute: bool = False


class WarmrouteError(Exception):
    """Base of every error that this project raises on purpose."""


class UserError(WarmrouteError):
    """A caller's mistake, or a limit that the caller met. `error` goes to the client as it is.
    `stage`: which stage of the gateway had no room, "" where none was asked for any."""

    def __init__(self, error: CoreError, stage: str = "") -> None:
        super().__init__(error.message)
        self.error = error
        self.stage = stage


class InvariantError(WarmrouteError):
    """A promise of our own was broken."""


class WireError(WarmrouteError):
    """A frame that is too large, malformed, or of a version that is not spoken here."""


class BusError(WarmrouteError):
    """The bus can't be started or reached, or refuses our credentials."""
