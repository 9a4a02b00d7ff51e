"""What happened in the cache, on its way from the engine thread to whoever publishes it.

Bounded: where nobody takes anything for long, all is dropped and readers are told to start anew.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from events.kvevents import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent

MAX_CHANGES = 262_144
HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Stored:
    name: int
    parent: int | None
    tokens: bytes
    adapter: str


def engine_hash(key: bytes) -> int:
    """How others name our block: 64 bits of its key, which is keyed with the cluster's secret."""
    return int.from_bytes(key[:HASH_BYTES], "big")


class KvEventLog:
    """Implements replica.cache.prefix.CacheWatcher; written by one thread, drained by another."""

    def __init__(self, block_tokens: int, limit: int = MAX_CHANGES) -> None:
        self.dropped = 0
        self._block_tokens = block_tokens
        self._limit = limit
        self._changes: deque[_Stored | int | None] = deque()

    def stored(self, key: bytes, parent: bytes | None, tokens: bytes, adapter: str = "") -> None:
        """See CacheWatcher."""
        above = engine_hash(parent) if parent is not None else None
        self._note(_Stored(engine_hash(key), above, tokens, adapter))

    def removed(self, key: bytes) -> None:
        """See CacheWatcher."""
        self._note(engine_hash(key))

    def drain(self) -> list[KVEvent]:
        """Events since the last call; what follows one another in a prompt is one event."""
        events: list[KVEvent] = []
        run: list[_Stored] = []
        while self._changes:
            change = self._changes.popleft()
            if isinstance(change, _Stored) and run and change.parent == run[-1].name:
                run.append(change)
                continue
            if run:
                events.append(self._event(run))
            run = [change] if isinstance(change, _Stored) else []
            if isinstance(change, int):
                events.append(BlocksRemoved((change,)))
            elif change is None:
                events.append(BlocksCleared())
        if run:
            events.append(self._event(run))
        return events

    def _note(self, change: _Stored | int) -> None:
        if len(self._changes) >= self._limit:
            self.dropped += len(self._changes)
            self._changes.clear()
            self._changes.append(None)
        self._changes.append(change)

    def _event(self, run: list[_Stored]) -> BlocksStored:
        tokens = b"".join(stored.tokens for stored in run)
        return BlocksStored(
            hashes=tuple(stored.name for stored in run),
            parent=run[0].parent,
            token_ids=struct.unpack(f"<{len(tokens) // 4}I", tokens),
            block_size=self._block_tokens,
            extra_keys=(None,) * len(run),
            adapter=run[0].adapter,
        )
