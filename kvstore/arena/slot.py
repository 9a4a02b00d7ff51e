"""What the arena knows of one slot, and of one user of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """WRITING: reserved, seen by nobody else. READY: may be opened. DYING: forgotten, still read.
    QUARANTINED: its writer is late and may still be writing."""

    WRITING = 0
    READY = 1
    DYING = 2
    QUARANTINED = 3


@dataclass(slots=True, eq=False)
class Slot:
    """One block's place. `used` orders slots by their last use; `ends_s` is the end of the block's
    TTL, `pinned_s` the end of its pin, both on the monotonic clock."""

    offset: int
    slot_bytes: int
    generation: int
    key: bytes
    scope: bytes
    payload_bytes: int
    state: State = State.WRITING
    namespace: bytes = b""
    header: bytes = b""
    readers: int = 0
    used: int = 0
    ends_s: float | None = None
    pinned_s: float = 0.0


@dataclass(slots=True)
class Held:
    """A slot in the hands of a session: being written, or read `count` times over."""

    slot: Slot
    deadline_s: float
    count: int = 1


@dataclass(slots=True, eq=False)
class Session:
    """Who reserves and opens: one connection. All that it holds goes back when it ends.

    Both dicts are by offset, the oldest deadline first.
    """

    name: str
    writes: dict[int, Held] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    ended: bool = False
    overdue: bool = False
