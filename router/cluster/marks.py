"""Where other routers have just sent a prefix: marks of its block keys at a few depths.

A cold prefix whose siblings come over several routers is computed once, not once per router. A
block key stands for the whole prefix before it, so that one mark that matches vouches for all of
it. Only blocks that are still to be computed are marked, one in eight and a few more: what travels
and is kept grows with the prefill of the fleet, and a look-up tries two depths per octave, then
goes on in small steps from the deepest that is found.
"""

from __future__ import annotations

import bisect
import itertools

from kvstore.identity import KEY_BYTES, KeyChain

MARK_BYTES = 8
MAX_MARKS = 131_072
STEP_BLOCKS = 8
DEPTHS = tuple(sorted({step << octave for octave in range(17) for step in (1, 3)}))
"""In blocks: 1, 2, 3, 4, 6, 8, 12, ...; from 8 on all of them are whole steps but 12."""


def marks_of(chain: KeyChain, known_blocks: int) -> bytes:
    """The marks of the blocks behind the first `known_blocks`, one after the other."""
    data, blocks = chain.data, len(chain)
    coarse = [depth for depth in DEPTHS if known_blocks < depth <= blocks and depth % STEP_BLOCKS]
    fine = range(_next_step(known_blocks), blocks + 1, STEP_BLOCKS)
    return b"".join([_mark(data, depth) for depth in (*coarse, *fine)])


def _next_step(depth: int) -> int:
    return (depth // STEP_BLOCKS + 1) * STEP_BLOCKS


def _mark(keys: bytes, depth: int) -> bytes:
    start = (depth - 1) * KEY_BYTES
    return keys[start : start + MARK_BYTES]


class Marks:
    """Mark -> (replica, expiry), about oldest first; bounded. Monotonic times. `empty`: there is
    none."""

    def __init__(self, limit: int = MAX_MARKS) -> None:
        self.empty = True
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
        self.empty = not self._entries

    def deepest(self, chain: KeyChain, known_blocks: int, now_s: float) -> tuple[str, int] | None:
        """(replica, leading blocks) of a long marked prefix of the chain, if there is any.
        `known_blocks`: what the best replica is known to hold; what is computed begins there."""
        begin = _next_step(known_blocks)
        place = bisect.bisect(DEPTHS, begin)
        last = bisect.bisect(DEPTHS, len(chain))
        for depth in (*DEPTHS[place:last][::-1], begin, *DEPTHS[: min(place, last)][::-1]):
            if depth <= len(chain):
                found = self._entries.get(_mark(chain.data, depth))
                if found is not None and found[1] > now_s:
                    return found[0], self._beyond(chain, depth, found[0])
        return None

    def _beyond(self, chain: KeyChain, depth: int, replica: str) -> int:
        """How far it goes on from there, in whole steps."""
        for further in range(_next_step(depth), len(chain) + 1, STEP_BLOCKS):
            found = self._entries.get(_mark(chain.data, further))
            if found is None or found[0] != replica:
                break
            depth = further
        return depth

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        self._entries = {mark: of for mark, of in self._entries.items() if of[0] != replica}
        self.empty = not self._entries

    def expire(self, now_s: float) -> None:
        """Drop what is over, from the oldest end."""
        over = itertools.takewhile(lambda entry: entry[1][1] <= now_s, self._entries.items())
        for mark, _ in list(over):
            del self._entries[mark]
        self.empty = not self._entries
