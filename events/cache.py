"""Cache facts: what the replica's own journal says about logical residency."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class CacheOp(IntEnum):
    """STORED: 0 to 1 copies of a key. REMOVED: 1 to 0 copies. CLEARED: no key is resident."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class CacheFact(NamedTuple):
    """One entry of the journal, in commit order. `key` is 16 bytes, empty for CLEARED."""

    op: CacheOp
    key: bytes
