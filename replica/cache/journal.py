"""The journal: what changed in the cache's logical residency since the publisher last asked.

Kept as net changes: a key that came and went between two drains leaves no entry. So it never holds
more than the keys resident at the last drain plus those resident now, however long nobody drains
it, and it can't overflow: no change is ever lost, and no full snapshot is needed to repair one.
"""

from __future__ import annotations

from threading import Lock

from events.cache import CacheFact, CacheOp


class Journal:
    """Written by the engine thread, drained by one reader on any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[bytes, CacheOp] = {}
        self._cleared = False

    def __len__(self) -> int:
        return len(self._pending) + self._cleared

    def stored(self, key: bytes) -> None:
        """The key's first copy is resident."""
        self._note(key, CacheOp.STORED)

    def removed(self, key: bytes) -> None:
        """The key's last copy is gone."""
        self._note(key, CacheOp.REMOVED)

    def cleared(self) -> None:
        """No key is resident."""
        with self._lock:
            self._pending.clear()
            self._cleared = True

    def drain(self) -> list[CacheFact]:
        """The changes since the last call; replaying them on its state gives today's residency."""
        with self._lock:
            pending, self._pending = self._pending, {}
            cleared, self._cleared = self._cleared, False
        facts = [CacheFact(CacheOp.CLEARED, b"")] if cleared else []
        facts += [CacheFact(op, key) for key, op in pending.items()]
        return facts

    def _note(self, key: bytes, op: CacheOp) -> None:
        with self._lock:
            # Residency alternates, so an entry that is already there is the opposite of this one.
            if self._pending.pop(key, None) is None:
                self._pending[key] = op
