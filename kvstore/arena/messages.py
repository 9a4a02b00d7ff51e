"""What users of an arena ask for and get; they cross kvd's socket as they are."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from kvstore.block import MAX_HEADER_BYTES

MAX_KEYS = 1_024
_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """A block that somebody wants to write. `scope`: whose quota it takes."""

    key: _Key
    payload_bytes: _Natural
    scope: _Key


class Refusal(StrEnum):
    """Why nothing was reserved. PRESENT: it is there. BUSY: somebody else is writing it. FULL: all
    of the arena is in use just now. LIMIT: too much in one user's hands."""

    PRESENT = "present"
    BUSY = "busy"
    FULL = "full"
    QUOTA = "quota"
    SIZE = "size"
    LIMIT = "limit"


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A slot in somebody's hands."""

    offset: _Natural
    generation: _Natural


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A block that has been written whole."""

    place: Place
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A block that may be read until it is released."""

    place: Place
    payload_bytes: _Natural
    header: bytes


class ScopeUse(msgspec.Struct, frozen=True):
    """What one owner takes. `scope` in hex."""

    scope: str
    used_bytes: int
    quota_bytes: int
    blocks: int


class ArenaStats(msgspec.Struct, frozen=True):
    """Now: bytes and blocks. Since the start: counts; `refused` by reason. `overdue`: users that
    kept a slot beyond its deadline; `reaped`: slots taken back from users that ended."""

    total_bytes: int
    used_bytes: int
    blocks: int
    writing: int
    leased: int
    dying: int
    quarantined: int
    quarantined_bytes: int
    pinned_bytes: int
    sessions: int
    hits: int
    misses: int
    stored: int
    evicted: int
    expired: int
    deleted: int
    bad_commits: int
    overdue: int
    reaped: int
    refused: dict[str, int]
    scopes: list[ScopeUse]
