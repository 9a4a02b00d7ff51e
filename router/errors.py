"""What can go wrong between the gateway and a replica.

WarmrouteError
  LinkRefusedError     a replica's address or answer is not acceptable; nothing is sent to it
  AttemptError   one attempt of a request ended without its answer
"""

from __future__ import annotations

from events.errors import (
    ADAPTER_LOAD_FAILED,
    ADAPTER_NOT_FINITE,
    DRAINING,
    ENGINE_GONE,
    QUEUE_LONGER,
    CoreError,
    WarmrouteError,
)

TRANSPORT = "transport"
REFUSED = "refused"
TIMEOUT = "timeout"
ERROR = "error"
SLOW_READER = "slow_reader"
LINK_FULL = "link_full"
"""The code of a request for which too much waits on the way to a replica."""


class LinkRefusedError(WarmrouteError):
    """`reason` is one word for counters, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AttemptError(WarmrouteError):
    """One attempt ended badly. `kind` is one of the names above; `error` is for the client."""

    def __init__(self, kind: str, error: CoreError) -> None:
        super().__init__(error.message)
        self.kind = kind
        self.error = error

    @property
    def replica_fault(self) -> bool:
        """Whether a breaker may count it: transport, timeouts and 5xx, never a caller's mistake or
        an adapter's: the model itself and other adapters are well there."""
        if self.kind == ERROR:
            spared = self.error.code in (ADAPTER_LOAD_FAILED, ADAPTER_NOT_FINITE)
            return self.error.status >= 500 and not spared
        return self.kind in (TRANSPORT, TIMEOUT)

    @property
    def rerouted(self) -> bool:
        """Whether the replica only found its queue longer than was believed."""
        return self.kind == REFUSED and self.error.code == QUEUE_LONGER

    @property
    def deserted(self) -> bool:
        """Whether nothing comes from that replica any more, for anybody."""
        return self.kind == TRANSPORT or self.error.code in (DRAINING, ENGINE_GONE)

    @property
    def cause(self) -> str:
        """One word for counters, from a fixed set."""
        known = self.error.code in (LINK_FULL, QUEUE_LONGER, DRAINING, ENGINE_GONE)
        return self.error.code or self.kind if known else self.kind

    @property
    def retryable(self) -> bool:
        """Whether another replica may be asked, as long as nothing was delivered yet."""
        return self.kind in (TRANSPORT, REFUSED) or (
            self.kind == ERROR and self.error.status >= 500
        )


def transport_failure(message: str, code: str = "replica_unreachable") -> AttemptError:
    """The link broke, or was not there, or took no more."""
    error = CoreError(
        status=503,
        message=message,
        type="server_error",
        code=code,
        retry_after_s=1.0,
    )
    return AttemptError(TRANSPORT, error)


def timeout_failure(message: str) -> AttemptError:
    """A deadline passed."""
    error = CoreError(status=504, message=message, type="server_error", code="timeout")
    return AttemptError(TIMEOUT, error)


def slow_reader_failure() -> AttemptError:
    """The client did not take what it asked for."""
    error = CoreError(status=408, message="the answer was not read in time", code="slow_reader")
    return AttemptError(SLOW_READER, error)


def finish_failure(reason: str, error: CoreError | None) -> AttemptError:
    """A child ended with "error" or with an "abort" that nobody here asked for."""
    if error is None:
        error = CoreError(
            status=503,
            message=f"the replica ended the request ({reason})",
            type="server_error",
            code="replica_aborted",
            retry_after_s=1.0,
        )
    return AttemptError(REFUSED if error.reroute else ERROR, error)
