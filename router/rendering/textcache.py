"""Token ids of texts, remembered per tenant and bounded in bytes.

Per tenant, because a hit is faster than a miss: nobody may learn from that what others wrote.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence

_ENTRY_BYTES = 200
"""What an entry costs beside its text and ids."""


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _cost(text: str, ids: bytes) -> int:
    return sys.getsizeof(text) + len(ids) + _ENTRY_BYTES


class _Shelf:
    """One tenant's entries, least recently used first."""

    __slots__ = ("entries", "size_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def get(self, text: str) -> bytes | None:
        """The ids, or None."""
        ids = self.entries.get(text)
        if ids is not None:
            self.entries.move_to_end(text)
        return ids

    def pop_oldest(self) -> int:
        cost = _cost(*self.entries.popitem(last=False))
        self.size_bytes -= cost
        return cost


class TextCache:
    """Text to ids (u32 little endian). A tenant over its own bound loses its own oldest entries;
    over the common bound, the tenant that was away longest loses first. Event loop only."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self.size_bytes = 0

    def get(self, tenant: str, text: str) -> bytes | None:
        """The ids, or None."""
        shelf = self._shelves.get(tenant)
        ids = None if shelf is None else shelf.get(text)
        if ids is not None:
            self._shelves.move_to_end(tenant)
        return ids

    def texts_of(self, tenant: str) -> OrderedDict[str, bytes]:
        """What is known of one tenant, to be read before anything else happens. Whoever uses an
        entry moves it to the end."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return OrderedDict()
        self._shelves.move_to_end(tenant)
        return shelf.entries

    def put(self, tenant: str, text: str, ids: bytes) -> None:
        """Remember, the newest wins; what is too large for a tenant is left out."""
        cost = _cost(text, ids)
        if cost > self._max_tenant_bytes:
            return
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = _Shelf()
        self._shelves.move_to_end(tenant)
        self._drop(shelf, text)
        shelf.entries[text] = ids
        shelf.size_bytes += cost
        self.size_bytes += cost
        self._shrink(shelf)

    def _drop(self, shelf: _Shelf, text: str) -> None:
        old = shelf.entries.pop(text, None)
        if old is not None:
            shelf.size_bytes -= _cost(text, old)
            self.size_bytes -= _cost(text, old)

    def _shrink(self, shelf: _Shelf) -> None:
        while shelf.size_bytes > self._max_tenant_bytes:
            self.size_bytes -= shelf.pop_oldest()
        while self.size_bytes > self._max_bytes:
            tenant, oldest = next(iter(self._shelves.items()))
            self.size_bytes -= oldest.pop_oldest()
            if not oldest.entries:
                del self._shelves[tenant]
