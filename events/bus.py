"""The bus as everybody sees it: publish, subscribe, request, serve, and word of losses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from events.store import Store

Handler = Callable[[str, bytes], None]
"""(subject, payload); runs on the event loop and must not block."""

Responder = Callable[[bytes], Awaitable[bytes]]
GapListener = Callable[[str], None]
"""Called with a reason ("reconnect", "slow_consumer") whenever messages may have been lost."""


class Subscription(Protocol):
    """A live subscription."""

    async def close(self) -> None:
        """Stop; idempotent."""


class Bus(Protocol):
    """Core NATS semantics: at most once, no history. Every loss is a gap that a reader repairs."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Hand over; never waits for the bus to be reachable: drops and counts when it isn't."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """`subject` may hold "*" tokens."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """One reply. Raises TimeoutError (nobody there counts as a timeout)."""

    async def serve(self, subject: str, responder: Responder) -> Subscription:
        """Answer requests on `subject`."""

    def on_gap(self, listener: GapListener) -> None:
        """Register for possible losses."""

    def store(self, bucket: str) -> Store:
        """What the bus's server keeps under that name; whether it can shows at its use."""

    @property
    def connected(self) -> bool:
        """Whether the bus is reachable now."""

    async def close(self) -> None:
        """Flush what can be flushed within a second, then leave."""
