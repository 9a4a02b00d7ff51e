"""What each replica holds, as its digests say: one column for its device, one for each tier below.

Writes both indexes, and on the member what its digest is known to be. A digest that can't be read
is unknown, and named.
"""

from __future__ import annotations

import numpy as np

from events.load import DigestShape
from router.fleet.member import Member
from router.locality.below import BelowIndex
from router.locality.falsehits import FalseHits
from router.locality.index import DigestIndex
from router.telemetry.alarms import Alarms, Clock


class Digests:
    """Between the feed's words and the indexes."""

    def __init__(
        self,
        index: DigestIndex,
        below: BelowIndex,
        alarms: Alarms,
        false_hits: FalseHits,
        clock: Clock,
    ) -> None:
        self._index = index
        self._below = below
        self._alarms = alarms
        self._false_hits = false_hits
        self._clock = clock

    def reset(
        self, member: Member, cursor: tuple[int, int], shape: DigestShape, bits: np.ndarray
    ) -> None:
        """A whole digest, at a (generation, seq)."""
        replica = member.replica
        if not self._index.place(replica, member.pool, shape.column):
            self._alarms.raise_("index_full", replica, "no memory left for its digest")
            return
        try:
            device, *below = np.split(bits, shape.columns)
            self._index.reset(replica, device)
            self._below.reset(replica, member.pool, shape.column, below)
        except ValueError as error:
            self._lose(member, str(error))
            return
        if member.digest_cursor is None or member.digest_cursor[0] != cursor[0]:
            self._false_hits.forget(replica)
        member.digest_shape, member.digest_cursor = shape, cursor
        member.digest_at_s, member.unknown_since_s = self._clock(), None
        self._alarms.clear("no_events", replica)
        self._alarms.clear("bad_digest", replica)

    def apply(
        self, member: Member, seq: int, became_set: np.ndarray, became_clear: np.ndarray
    ) -> None:
        """Changes of a known digest, up to `seq`."""
        assert member.digest_cursor is not None
        try:
            self._change(member, became_set, became_clear)
        except ValueError as error:
            self._lose(member, str(error))
            return
        member.digest_cursor = (member.digest_cursor[0], seq)
        member.digest_at_s = self._clock()

    def forget(self, member: Member) -> None:
        """It is unknown from now on."""
        self._index.forget(member.replica)
        self._below.forget(member.replica)
        member.digest_cursor = None
        if member.unknown_since_s is None:
            member.unknown_since_s = self._clock()

    def remove(self, replica: str) -> None:
        """Its columns are free."""
        self._index.remove(replica)
        self._below.remove(replica)

    def locality(self, member: Member) -> str:
        """What its warm blocks are known by; see ReplicaView."""
        if self._index.known(member.replica):
            return "digest"
        never = not member.hello.digests or self._alarms.active("no_events", member.replica)
        return "optimistic" if never else "unknown"

    def _lose(self, member: Member, why: str) -> None:
        self.forget(member)
        self._alarms.raise_("bad_digest", member.replica, why)

    def _change(self, member: Member, became_set: np.ndarray, became_clear: np.ndarray) -> None:
        """In the column that each position lies in."""
        shape, replica = member.digest_shape, member.replica
        if shape is None or shape.columns == 1:
            self._index.apply(replica, became_set, became_clear)
            return
        for place in range(shape.columns):
            news = [_within(part, place, shape.bits) for part in (became_set, became_clear)]
            if not any(part.size for part in news):
                continue
            if place:
                self._below.apply(replica, place - 1, *news)
            else:
                self._index.apply(replica, *news)


def _within(positions: np.ndarray, column: int, bits: int) -> np.ndarray:
    """Those of one column, counted from its start."""
    inside = positions[positions // bits == column]
    return inside - np.uint32(column * bits)
