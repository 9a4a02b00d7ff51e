"""The simplest tier: blocks in this process's own memory. The others are held to what it does."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.block import Whose, belongs, decode
from kvstore.errors import BadBlockError
from kvstore.handle import Ended
from kvstore.tier import (
    CLOSED,
    LATE,
    MISS,
    PRESENT,
    STORED,
    WRONG_SIZE,
    Caps,
    Handle,
    Health,
    Landed,
    Outcome,
    Read,
    Status,
    TierStats,
    Write,
    failed,
    hit,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    header: bytes
    payload: bytes
    namespace: bytes
    scope: bytes
    ends_s: float | None

    @property
    def size(self) -> int:
        return len(self.header) + len(self.payload)


class MemoryTier:
    """At most `max_bytes` of blocks; the least recently used leave first."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.caps = Caps(
            name="memory",
            max_value_bytes=max_bytes,
            trusted=True,
            shared=False,
        )
        self._clock = clock
        self._blocks: OrderedDict[bytes, _Stored] = OrderedDict()
        self._used_bytes = 0
        self._counts: Counter[Status] = Counter()
        self._read_bytes = 0
        self._written_bytes = 0
        self._lock = Lock()
        self._closed = False

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many keys from the first one on are there."""
        with self._lock:
            for count, key in enumerate(keys):
                if self._living(key) is None:
                    return count
            return len(keys)

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        """All of it has happened when this returns."""
        outcomes = []
        for place, read in enumerate(reads):
            outcomes.append(self._read(read, deadline))
            if landed is not None and outcomes[-1].status is Status.HIT:
                landed(place)
        return Ended(self._counted(outcomes))

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        """All of it has happened when this returns."""
        return Ended(self._counted([self._write(write, deadline) for write in writes]))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def purge(self, whose: Whose) -> int:
        """Forget all their blocks."""
        with self._lock:
            found = [key for key, stored in self._blocks.items() if belongs(stored.header, whose)]
            for key in found:
                self._drop(key)
            return len(found)

    def stats(self) -> TierStats:
        """Counts since the start."""
        counts = self._counts
        return TierStats(
            hits=counts[Status.HIT],
            misses=counts[Status.MISS],
            stored=counts[Status.STORED],
            present=counts[Status.PRESENT],
            failed=counts[Status.FAILED],
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            blocks=len(self._blocks),
            used_bytes=self._used_bytes,
        )

    def health(self) -> Health:
        """Nothing can keep it from answering."""
        return Health.OK

    def drain(self, timeout_s: float) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self._used_bytes = 0

    def _read(self, read: Read, deadline: float) -> Outcome:
        with self._lock:
            refused = self._refusal(deadline)
            stored = None if refused else self._living(read.key)
            if stored is None:
                return refused or MISS
            self._blocks.move_to_end(read.key)
        if read.into.nbytes != len(stored.payload):
            return WRONG_SIZE
        read.into.cast("B")[:] = stored.payload
        self._read_bytes += len(stored.payload)
        return hit(stored.header)

    def _write(self, write: Write, deadline: float) -> Outcome:
        try:
            header = decode(write.header)
        except BadBlockError as error:
            return failed(error.reason)
        size = len(write.header) + write.payload.nbytes
        if header.payload_bytes != write.payload.nbytes or size > self.caps.max_value_bytes:
            return WRONG_SIZE
        block, ttl_s = header.block, write.ttl_s
        ends_s = None if ttl_s is None else self._clock() + ttl_s
        stored = _Stored(write.header, bytes(write.payload), block.namespace, block.scope, ends_s)
        with self._lock:
            if refused := self._refusal(deadline):
                return refused
            if self._living(write.key) is not None:
                return PRESENT
            while self._used_bytes + size > self.caps.max_value_bytes:
                self._drop(next(iter(self._blocks)))
            self._blocks[write.key] = stored
            self._used_bytes += size
            self._written_bytes += write.payload.nbytes
        return STORED

    def _refusal(self, deadline: float) -> Outcome | None:
        if self._closed:
            return CLOSED
        return LATE if self._clock() > deadline else None

    def _living(self, key: bytes) -> _Stored | None:
        """The block, unless its time is over; the lock is held."""
        stored = self._blocks.get(key)
        if stored is not None and stored.ends_s is not None and stored.ends_s <= self._clock():
            self._drop(key)
            return None
        return stored

    def _drop(self, key: bytes) -> None:
        stored = self._blocks.pop(key, None)
        if stored is not None:
            self._used_bytes -= stored.size

    def _counted(self, outcomes: list[Outcome]) -> list[Outcome]:
        with self._lock:
            self._counts.update(outcome.status for outcome in outcomes)
        return outcomes
