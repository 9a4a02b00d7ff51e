"""The seam to the tiers below the device's pool, as the scheduler sees it. Knows no bytes.

Loading is a hint that came true or didn't: whatever fails there, the request computes its tokens.
The destination blocks of a load belong to its request, which keeps them until the load's one
terminal event; only then may they be read, published or freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from replica.sched.plan import ChildId


@dataclass(frozen=True, slots=True)
class Wanted:
    """Full blocks of one child's prompt that the device doesn't hold: those of `chain` from number
    `first` on.

    `tokens`: their token ids, u32 little endian, back to back. `salt`, `public_cut_blocks` and
    `adapter`: what the chain was made with.
    """

    child: ChildId
    tenant: str
    salt: bytes
    public_cut_blocks: int
    first: int
    chain: tuple[bytes, ...]
    tokens: bytes
    adapter: tuple[str, str] | None = None

    @property
    def blocks(self) -> int:
        """How many are wanted."""
        return len(self.chain) - self.first

    @property
    def head(self) -> bytes:
        """The key of the first one that is wanted."""
        return self.chain[self.first]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A committed full block. Its bytes are in device block `block` for as long as the pool's
    generation of that block is `generation`. `awaited`: somebody waits for it in a store, so it
    goes there on its first use."""

    tenant: str
    salt: bytes
    public_cut_blocks: int
    index: int
    before: bytes
    key: bytes
    tokens: bytes
    block: int
    generation: int
    awaited: bool = False
    adapter: tuple[str, str] | None = None


class Tiers(Protocol):
    """Every method is called on the engine thread and returns at once."""

    def look(self, wanted: Wanted) -> None:
        """Read ahead while the child queues, where that may pay."""

    def worth(self, wanted: Wanted) -> bool:
        """Whether a load of these blocks is under way, done, or still to be tried."""

    def land(self, wanted: Wanted, blocks: tuple[int, ...]) -> None:
        """Bring as many leading blocks as will come in time into these device blocks, in order.

        `Scheduler.landed` is called exactly once for it, on the engine thread, whatever happens.
        """

    def drop(self, child: ChildId) -> None:
        """The child has ended: its load, or its write, may stop early. Idempotent; unknown children
        are ignored.

        A load that `land` took on still has its terminal event, and so has a write."""

    def stored(self, block: StoredBlock) -> None:
        """A block was computed here and committed."""

    def used(self, keys: tuple[bytes, ...]) -> None:
        """A request found these blocks on the device."""

    def write_out(self, child: ChildId, store: str, blocks: tuple[StoredBlock, ...]) -> None:
        """Have these leading blocks of a prompt in the store, those that are there already too.

        They stay leased until `Scheduler.written` is called for it, on the engine thread: exactly
        once, soon after the time that a write may take at most, with how many are there then.
        """
