"""What replicas will hold soon: the blocks of requests that were just sent to them.

Closes the window between a choice and the first digest that shows its effect, so that the siblings
of a cold shared prefix follow it. Also the only locality there is for a replica without a digest.
Exact, bounded, and gone after a while, or at once when the request fails.
"""

from __future__ import annotations

from collections import OrderedDict

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
        self._entries: dict[str, OrderedDict[bytes, tuple[float, str]]] = {}

    def __len__(self) -> int:
        return self._keys

    def replicas(self) -> list[str]:
        """Who is promised anything."""
        return list(self._entries)

    def remember(
        self, replica: str, decision_id: str, chain: KeyChain, known_blocks: int, until_s: float
    ) -> None:
        """The blocks behind the first `known_blocks` of the chain are on their way there."""
        entries = self._entries.setdefault(replica, OrderedDict())
        self._keys -= len(entries)
        data, first = chain.data, known_blocks * KEY_BYTES
        # A key that is renewed keeps its place: it may then expire late in memory, never in effect.
        entries.update(
            dict.fromkeys(
                (data[at : at + KEY_BYTES] for at in range(first, len(data), KEY_BYTES)),
                (until_s, decision_id),
            )
        )
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
        for key in chain:
            entry = entries.get(key)
            if entry is not None and entry[1] == decision_id:
                del entries[key]
                self._keys -= 1

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        self._keys -= len(self._entries.pop(replica, ()))

    def expire(self, now_s: float) -> None:
        """Drop what is over, from the oldest end."""
        for entries in self._entries.values():
            while entries and next(iter(entries.values()))[0] <= now_s:
                entries.popitem(last=False)
                self._keys -= 1

    def _bound(self, replica: str) -> None:
        entries = self._entries[replica]
        while entries and (len(entries) > self._per_replica or self._keys > self._in_all):
            entries.popitem(last=False)
            self._keys -= 1
            self.dropped_total += 1
