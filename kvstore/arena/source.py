"""Blocks of an arena, to be sent elsewhere straight out of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.arena.arena import Arena
from kvstore.arena.messages import MAX_KEYS, Opened, Place


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """`payload` lies in the arena and stays as it is until the block is released."""

    header: bytes
    payload: memoryview
    place: Place


class ArenaSource:
    """One user of the arena; it must release what it leases, within the arena's lease time."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena = arena
        self._session = arena.session(name)

    def lease(self, keys: Sequence[bytes]) -> list[LeasedBlock]:
        """The blocks from the first key on, up to the first one that is not there."""
        opened = self._arena.open(self._session, keys[:MAX_KEYS])
        return [LeasedBlock(block.header, self._bytes(block), block.place) for block in opened]

    def release(self, blocks: Sequence[LeasedBlock]) -> None:
        """Nobody reads them any more."""
        self._arena.release(self._session, [block.place for block in blocks])

    def close(self) -> None:
        """Gives everything back."""
        self._arena.end(self._session)

    def _bytes(self, block: Opened) -> memoryview:
        return self._arena.segment.slot(block.place.offset, block.payload_bytes).data
