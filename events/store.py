"""A small key-value store that the bus's server keeps: what all routers share and none may lose.

Off the hot path. Values are opaque: whoever writes secrets seals them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from events.bus import Subscription
from events.errors import BusError

MAX_VALUE_BYTES = 768 * 1024
MAX_STORE_BYTES = 256 * 1024 * 1024


class StoreError(BusError):
    """The store can't be reached, or there is none: the server has no JetStream."""


class Entry(NamedTuple):
    """The newest value of a key. `revision` rises with every change of any key."""

    key: str
    value: bytes
    revision: int


ChangeListener = Callable[[str], None]
"""Called with a key that was written; may be called too often, and is never called for certain."""


class Store(Protocol):
    """Keys are two subject tokens, "kind.name". Everything but `watch` raises StoreError."""

    async def put(self, key: str, value: bytes) -> int:
        """Write; the new revision."""

    async def get(self, key: str) -> Entry | None:
        """The newest value."""

    async def load(self) -> list[Entry]:
        """Every key; the store is made where it is missing."""

    async def last_revision(self) -> int:
        """Of the newest change; 0 in an empty store."""

    async def watch(self, listener: ChangeListener) -> Subscription:
        """Be told of changes from now on, as surely as the bus tells anything."""
