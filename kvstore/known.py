"""What a tier is believed to hold: blocks that it confirmed, until it denies them or they grow old.

Others may write and evict there without telling, so this is a hint, for digests alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from events.cache import CacheFact, CacheOp


class Known:
    """At most `max_keys` keys, the ones confirmed longest ago leaving first. Threads share it.

    `drain` tells net changes: replaying them gives the set, however long nobody asked.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, CacheOp] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def confirm(self, keys: Iterable[bytes]) -> None:
        """They are there."""
        with self._lock:
            for key in keys:
                if key not in self._keys:
                    self._note(key, CacheOp.STORED)
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                key, _ = self._keys.popitem(last=False)
                self._note(key, CacheOp.REMOVED)

    def deny(self, key: bytes) -> None:
        """It is not there."""
        with self._lock:
            if key in self._keys:
                del self._keys[key]
                self._note(key, CacheOp.REMOVED)

    def forget(self) -> list[bytes]:
        """Nothing is known to be there; returns what was."""
        with self._lock:
            keys = list(self._keys)
            self._keys.clear()
            for key in keys:
                self._note(key, CacheOp.REMOVED)
            return keys

    def drain(self) -> list[CacheFact]:
        """The changes since the last call."""
        with self._lock:
            pending, self._pending = self._pending, {}
        return [CacheFact(op, key) for key, op in pending.items()]

    def _note(self, key: bytes, op: CacheOp) -> None:
        # Residency alternates, so an entry that is already there is the opposite of this one.
        if self._pending.pop(key, None) is None:
            self._pending[key] = op
