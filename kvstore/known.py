"""What a tier is believed to hold: what it tells of itself, or else blocks that it confirmed, until
it denies them or they grow old.

Where others write and evict without telling this is a guess; for digests alone, in any case.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

from events.cache import CacheFact, CacheOp


class Known:
    """At most `max_keys` keys, the ones confirmed longest ago leaving first, and all that were
    confirmed longer than `max_age_s` ago. Threads share it. From the first call of `changed` or
    `lost` on, what is confirmed or denied makes no difference but to what `forget` calls ours, and
    nothing grows old.

    `drain` tells net changes: replaying them gives the set, however long nobody asked.
    """

    def __init__(
        self,
        max_keys: int,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._max_age_s = max_age_s
        self._clock = clock
        self._keys: OrderedDict[bytes, float] = OrderedDict()
        self._ours: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, CacheOp] = {}
        self._told = False
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def confirm(self, keys: Iterable[bytes]) -> None:
        """They are there."""
        with self._lock:
            if self._told:
                self._use(keys)
            else:
                self._add(keys)

    def deny(self, key: bytes) -> None:
        """It is not there."""
        with self._lock:
            if not self._told:
                self._remove(key)

    def changed(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """The tier tells what has come and gone since the last call, first of all what it has."""
        with self._lock:
            self._told = True
            for key in removed:
                self._remove(key)
                self._ours.pop(key, None)
            self._add(stored)

    def lost(self) -> None:
        """The tier, which tells, can't be heard: what it has is not known."""
        with self._lock:
            self._told = True
            self._ours.clear()
            for key in list(self._keys):
                self._remove(key)

    def forget(self) -> list[bytes]:
        """What of it is ours to delete, of which nothing will be there: all that is known, but of
        what others share and tell of, only what was confirmed here."""
        with self._lock:
            if self._told:
                ours, self._ours = self._ours, OrderedDict()
                return list(ours)
            keys = list(self._keys)
            for key in keys:
                self._remove(key)
            return keys

    def drain(self) -> list[CacheFact]:
        """The changes since the last call."""
        with self._lock:
            self._age()
            pending, self._pending = self._pending, {}
        return [CacheFact(op, key) for key, op in pending.items()]

    def _age(self) -> None:
        if self._told or self._max_age_s is None:
            return
        oldest_s = self._clock() - self._max_age_s
        while self._keys and next(iter(self._keys.values())) < oldest_s:
            key, _ = self._keys.popitem(last=False)
            self._note(key, CacheOp.REMOVED)

    def _add(self, keys: Iterable[bytes]) -> None:
        now_s = self._clock()
        for key in keys:
            if key not in self._keys:
                self._note(key, CacheOp.STORED)
            self._keys[key] = now_s
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            key, _ = self._keys.popitem(last=False)
            self._note(key, CacheOp.REMOVED)

    def _use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._ours[key] = None
            self._ours.move_to_end(key)
        while len(self._ours) > self._max_keys:
            self._ours.popitem(last=False)

    def _remove(self, key: bytes) -> None:
        if key in self._keys:
            del self._keys[key]
            self._note(key, CacheOp.REMOVED)

    def _note(self, key: bytes, op: CacheOp) -> None:
        # Residency alternates, so an entry that is already there is the opposite of this one.
        if self._pending.pop(key, None) is None:
            self._pending[key] = op
