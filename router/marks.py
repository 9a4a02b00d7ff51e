"""Where other routers have just sent a prefix: marks of its block keys at a few depths.

A cold prefix whose siblings come over several routers is computed once, not once per router. A
block key stands for the whole prefix before it, so that one mark that matches vouches for all of
it; with two depths per octave a sibling is credited with at least two thirds of what it shares.
"""

from __future__ import annotations

import itertools

from kvstore.identity import KEY_BYTES, KeyChain

MARK_BYTES = 8
MAX_MARKS = 131_072
DEPTHS = tuple(sorted({step << octave for octave in range(17) for step in (1, 3)}))
"""In blocks: 1, 2, 3, 4, 6, 8, 12, ..."""


def marks_of(chain: KeyChain, known_blocks: int) -> bytes:
    """The marks of the blocks behind the first `known_blocks`, one after the other."""
    return b"".join(
        _mark(chain.data, depth) for depth in DEPTHS if known_blocks < depth <= len(chain)
    )


def _mark(keys: bytes, depth: int) -> bytes:
    start = (depth - 1) * KEY_BYTES
    return keys[start : start + MARK_BYTES]


class Marks:
    """Mark -> (replica, expiry), about oldest first; bounded. Monotonic times."""

    def __init__(self, limit: int = MAX_MARKS) -> None:
        self._limit = limit
        self._entries: dict[bytes, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, replica: str, marks: bytes, until_s: float) -> None:
        """A prefix is on its way there; the newest word on a mark counts."""
        for start in range(0, len(marks) - MARK_BYTES + 1, MARK_BYTES):
            mark = marks[start : start + MARK_BYTES]
            self._entries.pop(mark, None)
            self._entries[mark] = replica, until_s
        excess = len(self._entries) - self._limit
        for mark in list(itertools.islice(self._entries, max(0, excess))):
            del self._entries[mark]

    def deepest(self, chain: KeyChain, now_s: float) -> tuple[str, int] | None:
        """(replica, leading blocks) of the longest marked prefix of the chain."""
        if not self._entries:
            return None
        for depth in reversed(DEPTHS):
            if depth <= len(chain):
                found = self._entries.get(_mark(chain.data, depth))
                if found is not None and found[1] > now_s:
                    return found[0], depth
        return None

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        self._entries = {mark: of for mark, of in self._entries.items() if of[0] != replica}

    def expire(self, now_s: float) -> None:
        """Drop what is over, from the oldest end."""
        over = itertools.takewhile(lambda entry: entry[1][1] <= now_s, self._entries.items())
        for mark, _ in list(over):
            del self._entries[mark]
