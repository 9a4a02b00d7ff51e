"""What replicas will hold soon: the blocks of requests that were just sent to them.

Closes the window between a choice and the first digest that shows its effect, so that the siblings
of a cold shared prefix follow it. Also the only locality there is for a replica without a digest.
Exact, bounded, and gone after a while, or at once when the request fails.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvstore.identity import KEY_BYTES, KeyChain

MAX_KEYS_PER_REPLICA = 16_384
MAX_KEYS = 524_288


class OptimisticEntries:
    """For each replica: key -> (expiry, owning decision), about oldest first. Monotonic times."""

    def __init__(self, per_replica: int = MAX_KEYS_PER_REPLICA, in_all: int = MAX_KEYS) -> None:
        self.dropped_total = 0
        self._per_replica = per_replica
        self._in_all = in_all
        self._keys = 0
        self._entries: dict[str, dict[bytes, tuple[float, str]]] = {}

    def __len__(self) -> int:
        return self._keys

    def replicas(self) -> list[str]:
        """Who is promised anything."""
        return list(self._entries)

    def remember(
        self, replica: str, decision_id: str, chain: KeyChain, known_blocks: int, until_s: float
    ) -> None:
        """The blocks behind the first `known_blocks` of the chain are on their way there."""
        if known_blocks >= len(chain):
            return
        entries = self._entries.setdefault(replica, {})
        self._keys -= len(entries)
        keys = np.frombuffer(chain.data, f"V{KEY_BYTES}")[known_blocks:].tolist()
        # A key that is renewed keeps its place: it may then expire late in memory, never in effect.
        entries.update(dict.fromkeys(keys, (until_s, decision_id)))
        self._keys += len(entries)
        self._bound(replica)

    def depth(self, replica: str, chain: KeyChain, known_blocks: int, now_s: float) -> int:
        """Leading blocks of the chain, given that the digest already vouches for some."""
        entries = self._entries.get(replica)
        if not entries:
            return known_blocks
        data, blocks = chain.data, len(chain)
        depth = known_blocks
        while depth < blocks:
            entry = entries.get(data[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            if entry is None or entry[0] <= now_s:
                break
            depth += 1
        return depth

    def forget_decision(self, replica: str, decision_id: str, chain: KeyChain) -> None:
        """The request failed: what it promised is not coming."""
        entries = self._entries.get(replica)
        if not entries:
            return
        gone = [key for key in chain if key in entries and entries[key][1] == decision_id]
        self._drop(replica, gone)

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        self._keys -= len(self._entries.pop(replica, ()))

    def expire(self, now_s: float) -> None:
        """Drop what is over, from the oldest end."""
        for replica in self.replicas():
            entries = self._entries[replica].items()
            over = itertools.takewhile(lambda entry: entry[1][0] <= now_s, entries)
            self._drop(replica, [key for key, _ in over])

    def _bound(self, replica: str) -> None:
        """Drop the oldest where there are too many."""
        entries = self._entries[replica]
        excess = max(len(entries) - self._per_replica, self._keys - self._in_all, 0)
        if excess:
            oldest = list(itertools.islice(entries, excess))
            self.dropped_total += len(oldest)
            self._drop(replica, oldest)

    def _drop(self, replica: str, keys: list[bytes]) -> None:
        entries = self._entries[replica]
        for key in keys:
            del entries[key]
        self._keys -= len(keys)
        if not entries:
            del self._entries[replica]
