"""What one user of kvd has still to be told of blocks that came and went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from threading import Lock

from kvstore.arena.arena import Arena
from kvstore.arena.messages import MAX_KEYS
from kvstore.kvd.messages import Changes


class Following:
    """Net changes since they were last taken, first of all whatever is there: never more entries
    than the arena has had blocks. The arena tells from any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stored_by_key: dict[bytes, bool] = {}
        self._lock = Lock()
        arena.subscribe(self._changed)

    def take(self) -> Changes | None:
        """The next of them, as many as a frame holds; None where there are none."""
        with self._lock:
            keys = list(islice(self._stored_by_key, MAX_KEYS))
            if not keys:
                return None
            stored = [self._stored_by_key.pop(key) for key in keys]
        came = [key for key, is_stored in zip(keys, stored, strict=True) if is_stored]
        went = [key for key, is_stored in zip(keys, stored, strict=True) if not is_stored]
        return Changes(came, went)

    def close(self) -> None:
        """Nothing is kept for it any more."""
        self._arena.unsubscribe(self._changed)

    def _changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        with self._lock:
            for keys, is_stored in ((stored, True), (removed, False)):
                for key in keys:
                    # A key comes and goes by turns: one that is still here is the opposite.
                    if self._stored_by_key.pop(key, None) is None:
                        self._stored_by_key[key] = is_stored
