"""Who may enter the remote tier: what is asked for a second time.

Most prompts are seen once; writing their blocks out would push out those that come back. Two
generations of a Bloom filter remember what was seen: the younger one takes new keys, and when it is
full, or old, the older one is forgotten. So a key is remembered for one to two generations, in
memory that never grows. A false positive admits a block one use too early, and costs nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from pybloom_live import BloomFilter

CAPACITY = 200_000
ERROR_RATE = 0.01
GENERATION_S = 1_800.0


class Doorkeeper:
    """Threads may share it. 2 x 240 KB at the default capacity."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        generation_s: float = GENERATION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._generation_s = generation_s
        self._clock = clock
        self._lock = Lock()
        self._young = self._empty()
        self._old = self._empty()
        self._born = clock()

    def touch(self, key: bytes) -> bool:
        """Note one use; whether it was at least the second one that is remembered."""
        name = key.hex()  # the filter hashes str(key): of bytes that would be their repr
        with self._lock:
            self._age()
            seen = name in self._young or name in self._old
            # Also what only the old generation knows: a key in use stays known.
            self._young.add(name)
            return seen

    def _age(self) -> None:
        now = self._clock()
        if self._young.count >= self._capacity or now - self._born >= self._generation_s:
            self._old, self._young, self._born = self._young, self._empty(), now

    def _empty(self) -> BloomFilter:
        return BloomFilter(capacity=self._capacity, error_rate=ERROR_RATE)
