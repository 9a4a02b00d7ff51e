"""Asking a replica for its whole digest: one request in flight, never a storm."""

from __future__ import annotations

import random

import msgspec

from events.bus import Bus
from events.envelope import unseal
from events.errors import WireError
from events.snapshot import FrozenDigest, SnapshotAssembly, decode_chunk
from events.subjects import snapshot_subject

CHUNK_TIMEOUT_S = 1.0
MIN_WAIT_S = 0.1
MAX_WAIT_S = 5.0
CALM_S = 5.0
"""So long without a new repair, and the wait starts small again."""

_encode = msgspec.msgpack.Encoder().encode


class Backoff:
    """When the next repair of one replica may start; the first one at once."""

    __slots__ = ("_next_s", "_rng", "_wait_s")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_s = 0.0
        self._wait_s = MIN_WAIT_S

    def ready(self, now_s: float) -> bool:
        """Whether a repair may start now."""
        return now_s >= self._next_s

    def started(self, now_s: float) -> None:
        """A repair starts: the next one waits, twice as long as the last time, with jitter."""
        if now_s > self._next_s + CALM_S:
            self._wait_s = MIN_WAIT_S
        self._next_s = now_s + self._wait_s * self._rng.uniform(0.75, 1.25)
        self._wait_s = min(MAX_WAIT_S, 2 * self._wait_s)


async def fetch_snapshot(bus: Bus, cluster: str, replica: str, boot: int) -> FrozenDigest:
    """The newest digest of this life of the replica.

    Raises TimeoutError when it doesn't answer, WireError when the answer can't be used.
    """
    assembly = SnapshotAssembly()
    while True:
        request = _encode(assembly.next_request)
        reply = await bus.request(snapshot_subject(cluster, replica), request, CHUNK_TIMEOUT_S)
        envelope = unseal(reply)
        if (envelope.sender, envelope.boot) != (replica, boot):
            raise WireError("the snapshot is of another replica or life")
        frozen = assembly.add(decode_chunk(bytes(envelope.payload)))
        if frozen is not None:
            return frozen
