"""Real blocks of a chain, small or large, and how a reader checks what came back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from events.load import KVLayout
from kvstore.block import BlockHeader, encode, header_of
from kvstore.identity import BlockIdentity
from kvstore.layout import Layout
from kvstore.tier import Outcome, Read, Status, Write
from kvstore.verify import Verifier
from tests.kvstore.blocks import BOOT, CLUSTER_KEY, SPACE, run_of

SMALL = KVLayout(
    dtype="bfloat16", layers=2, kv_heads=1, head_dim=16, block_tokens=4, rope="default:10000"
)
LARGE = KVLayout(
    dtype="bfloat16", layers=4, kv_heads=8, head_dim=256, block_tokens=32, rope="default:10000"
)
MAC_KEY = bytes(range(32, 64))


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a chain, complete."""

    identity: BlockIdentity
    layout: Layout
    header: bytes
    payload: bytes

    @property
    def key(self) -> bytes:
        return self.identity.key

    @property
    def value(self) -> bytes:
        """As stores keep it."""
        return self.header + self.payload

    def write(self, ttl_s: float | None = None) -> Write:
        return Write(self.key, self.header, memoryview(self.payload), ttl_s)

    def room(self) -> bytearray:
        return bytearray(self.layout.payload_bytes)


def chain_of(
    count: int, seed: int, salt: bytes = b"salt", kv: KVLayout = SMALL, ttl_s: float | None = None
) -> list[Block]:
    """A chain of complete blocks that nobody else has for another seed or salt."""
    layout, dice = Layout.of(kv), random.Random(seed)
    blocks = []
    for identity in run_of(count, seed=seed, salt=salt, space=replace(SPACE, layout=kv)):
        payload = bytearray(layout.payload_bytes)
        for layer in range(layout.layers):
            start = layout.segment(layer).start
            payload[start : start + layout.layer_bytes] = dice.randbytes(layout.layer_bytes)
        header = header_of(identity, layout, payload, BOOT, ttl_s=ttl_s)
        blocks.append(Block(identity, layout, encode(header, MAC_KEY), bytes(payload)))
    return blocks


def reads_into(blocks: Sequence[Block], rooms: Sequence[bytearray]) -> list[Read]:
    return [Read(block.key, memoryview(room)) for block, room in zip(blocks, rooms, strict=True)]


def verdict(block: Block, outcome: Outcome, room: bytearray) -> str:
    """What a reader does with it: `good`, a status, or the reason of its refusal."""
    if outcome.status is not Status.HIT:
        return outcome.reason or outcome.status.value
    verifier = Verifier(CLUSTER_KEY, block.layout)
    header = verifier.header(outcome.header, block.identity, MAC_KEY)
    if not isinstance(header, BlockHeader):
        return header.value
    reason = verifier.payload(header, room)
    if reason is None:
        assert room == block.payload, "verified, and yet not what was written"
        return "good"
    return reason.value
