"""Batches of small blocks for any tier."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.identity import BlockIdentity
from kvstore.layout import Layout
from kvstore.tier import Outcome, Read, Status, Tier, Write
from tests.kvstore.blocks import LAYOUT, encoded, payload_of

SOON_S = 60.0


def writes_of(blocks: Sequence[BlockIdentity], ttl_s: float | None = None) -> list[Write]:
    """Each block with a payload of its own."""
    return [
        Write(b.key, encoded(b, payload_of(place)), memoryview(payload_of(place)), ttl_s)
        for place, b in enumerate(blocks)
    ]


def put(tier: Tier, writes: Sequence[Write]) -> list[Status]:
    outcomes = tier.put(writes, time.monotonic() + SOON_S).result(SOON_S)
    return [outcome.status for outcome in outcomes]


def get(
    tier: Tier, keys: Sequence[bytes], layout: Layout = LAYOUT
) -> tuple[list[Outcome], list[bytes], list[int]]:
    """Outcomes, what lies in the buffers, and which reads were said to have landed."""
    buffers = [bytearray(layout.payload_bytes) for _ in keys]
    landed: list[int] = []
    reads = [Read(k, memoryview(b)) for k, b in zip(keys, buffers, strict=True)]
    outcomes = list(tier.get(reads, time.monotonic() + SOON_S, landed.append).result(SOON_S))
    return outcomes, [bytes(buffer) for buffer in buffers], landed
