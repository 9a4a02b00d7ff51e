"""What every place that holds blocks can do: host arena, peers, remote stores.

Called from helper threads, never from the engine's loop. A tier moves bytes; it neither believes
nor checks them, which is verify.py's task once they have landed. Every call has a deadline on the
monotonic clock, and none raises because of what another process or machine did: that is an Outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvstore.block import Whose


@dataclass(frozen=True, slots=True)
class Caps:
    """What a tier is. `max_value_bytes`: header and payload of one block. `trusted`: only processes
    of this host, under this user, can have written there; elsewhere headers carry a MAC. `shared`:
    others than this process read it. `drafts`: it takes writes whose checksums are still missing.
    `dated`: nothing there ends a block's life in time, so its header says when it is over;
    elsewhere the store does, and being asked for a block renews it."""

    name: str
    max_value_bytes: int
    trusted: bool
    shared: bool
    drafts: bool = False
    dated: bool = False


class Draft(Protocol):
    """A header that lacks the checksums of its layers."""

    @property
    def scope(self) -> bytes:
        """Whose block it is."""

    @property
    def layers(self) -> int:
        """How many checksums are missing."""

    def finished(self, sums: bytes) -> bytes:
        """The header's bytes."""


@dataclass(frozen=True, slots=True)
class Read:
    """One block wanted. The payload lands in `into`, which must be as long as the payload and which
    nobody else may write until the handle has ended."""

    key: bytes
    into: memoryview


@dataclass(frozen=True, slots=True)
class Write:
    """One block offered. `payload` must not change until the handle has ended; `ttl_s` None lives
    as long as the tier lets it. A tier that takes drafts may get one in place of the header, and
    makes the checksums while it copies, which costs little."""

    key: bytes
    header: bytes
    payload: memoryview
    ttl_s: float | None = None
    draft: Draft | None = None


class Status(StrEnum):
    """How one read or write ended. PRESENT: somebody had written it, or is writing it now."""

    HIT = "hit"
    MISS = "miss"
    STORED = "stored"
    PRESENT = "present"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`header`: the bytes as they were stored, with a HIT. `sums`: the checksums of the layers as
    they have landed, where the tier has made them: they cost little while the bytes are in the
    processor's cache. `reason`: one word, with FAILED; it may become a label of a counter."""

    status: Status
    header: bytes = b""
    reason: str = ""
    sums: bytes = b""


MISS = Outcome(Status.MISS)
STORED = Outcome(Status.STORED)
PRESENT = Outcome(Status.PRESENT)
CANCELLED = Outcome(Status.FAILED, reason="cancelled")
LATE = Outcome(Status.FAILED, reason="deadline")
BUSY = Outcome(Status.FAILED, reason="busy")
CLOSED = Outcome(Status.FAILED, reason="closed")
WRONG_SIZE = Outcome(Status.FAILED, reason="size")
"""Header and buffers don't fit together, or the tier takes no block of that size."""


def hit(header: bytes, sums: bytes = b"") -> Outcome:
    """The payload has landed."""
    return Outcome(Status.HIT, header, sums=sums)


def failed(reason: str) -> Outcome:
    """One word that says why."""
    return Outcome(Status.FAILED, reason=reason)


class Handle(Protocol):
    """A batch under way. It ends exactly once, by its deadline at the latest."""

    def result(self, timeout_s: float) -> Sequence[Outcome]:
        """One outcome per request, in order. Raises TimeoutError while it has not ended."""

    def cancel(self) -> None:
        """Returns only when no buffer of the batch is referenced any more; what had ended by then
        keeps its outcome."""


class Health(StrEnum):
    """OPEN: nothing is sent there for now. TRYING: one request at a time, to see."""

    OK = "ok"
    TRYING = "trying"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the start; `blocks`, `used_bytes` (0 where unknown) and `backlog_bytes` now."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    present: int = 0
    failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    blocks: int = 0
    used_bytes: int = 0
    backlog_bytes: int = 0


Landed = Callable[[int], None]
"""Told, in the tier's thread, that read i of the batch has landed whole, before the batch ends."""


class Tier(Protocol):
    """Threads may share it. Keys are block keys of identity.py."""

    @property
    def caps(self) -> Caps:
        """What it is; never changes."""

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many keys from the first one on are there, without a hole; 0 when it can't say."""

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        """Read blocks in order; those behind a miss may be left as misses."""

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        """Store what is not there yet."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, such as those that were found wrong; best effort."""

    def purge(self, whose: Whose) -> int:
        """Forget all their blocks; how many those were."""

    def stats(self) -> TierStats:
        """Counts; never waits for another process."""

    def health(self) -> Health:
        """Whether it is worth asking."""

    def drain(self, timeout_s: float) -> None:
        """Let what is under way end, for so long at most."""

    def close(self) -> None:
        """End everything; later calls fail as `closed`. Idempotent."""
