"""What moves a block's bytes between the device's pool and host memory, as the tiers see it."""

from __future__ import annotations

from typing import Protocol


class BlockMover(Protocol):
    """Called from helper threads, one block a call, while the engine computes on other blocks."""

    def gather(self, block: int, into: memoryview) -> None:
        """Device block to a payload of kvstore.layout."""

    def scatter(self, payload: memoryview, block: int) -> None:
        """A payload to a device block; it is there when this returns."""
