"""An arena for tests, on a clock that stands still."""

from __future__ import annotations

from dataclasses import replace

from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Finished, Place, Refusal, Want
from kvstore.arena.segment import Segment
from kvstore.arena.slot import Session
from kvstore.block import encode, header_of
from kvstore.identity import BlockIdentity
from kvstore.layout import Layout
from tests.kvstore.blocks import BOOT, NOW_MS, payload_of, run_of

MIB = 1 << 20
LARGE = Layout("float32", layers=4, kv_heads=4, head_dim=128, block_tokens=32, rope="r")
"""Half a MiB: an extent of 1 MiB has two slots."""
LARGER = replace(LARGE, head_dim=256)


class World:
    """An arena whose time is `now`."""

    def __init__(self, mib: int = 4, limits: ArenaLimits | None = None) -> None:
        self.now = 0.0
        self.arena = Arena(Segment.private(mib * MIB), limits, clock=lambda: self.now)

    def reserve(
        self, session: Session, block: BlockIdentity, layout: Layout = LARGE
    ) -> Place | Refusal:
        want = Want(block.key, layout.payload_bytes, block.scope)
        return self.arena.reserve(session, [want])[0]

    def commit(
        self,
        session: Session,
        block: BlockIdentity,
        place: Place,
        layout: Layout = LARGE,
        ttl_s: float | None = None,
    ) -> bool:
        return self.arena.commit(session, [Finished(place, header(block, layout), ttl_s)])[0]

    def store(
        self,
        session: Session,
        block: BlockIdentity,
        layout: Layout = LARGE,
        ttl_s: float | None = None,
    ) -> Place:
        place = self.reserve(session, block, layout)
        assert isinstance(place, Place), place
        assert self.commit(session, block, place, layout, ttl_s)
        return place


def header(block: BlockIdentity, layout: Layout = LARGE) -> bytes:
    """Of a payload of zeros; the arena doesn't look at payloads."""
    return _HEADERS.setdefault((block, layout), _header(block, layout))


def _header(block: BlockIdentity, layout: Layout) -> bytes:
    longer = replace(block, tokens=(block.tokens * 64)[: 4 * layout.block_tokens])
    return encode(header_of(longer, layout, bytes(layout.payload_bytes), BOOT, now_ms=NOW_MS))


_HEADERS: dict[tuple[BlockIdentity, Layout], bytes] = {}

__all__ = ["LARGE", "LARGER", "MIB", "World", "header", "payload_of", "run_of"]
