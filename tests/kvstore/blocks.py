"""Small blocks for the tests of the store."""

from __future__ import annotations

import random

import numpy as np

from events.load import KVLayout
from kvstore.block import BlockHeader, encode, header_of
from kvstore.identity import BlockIdentity, Namespace, chain, identities
from kvstore.layout import Layout

CLUSTER_KEY = bytes(range(32))
KV_LAYOUT = KVLayout(
    dtype="bfloat16", layers=3, kv_heads=1, head_dim=6, block_tokens=4, rope="default:10000"
)
LAYOUT = Layout.of(KV_LAYOUT)
SPACE = Namespace(model="m", weights="w", layout=KV_LAYOUT)
NOW_MS = 1_700_000_000_000
BOOT = 77


def token_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 1_000, count, dtype="<u4").tobytes()


def run_of(
    blocks: int, seed: int = 0, salt: bytes = b"salt", space: Namespace = SPACE, cut: int = 0
) -> list[BlockIdentity]:
    tokens = token_bytes(blocks * space.layout.block_tokens, seed)
    keys = chain(CLUSTER_KEY, space, salt, tokens, cut)
    return identities(CLUSTER_KEY, space, salt, tokens, keys, cut)


def payload_of(seed: int = 0, layout: Layout = LAYOUT) -> bytearray:
    """Random values, and zeros in the padding."""
    data = bytearray(layout.payload_bytes)
    for layer in range(layout.layers):
        start = layer * layout.stride_bytes
        data[start : start + layout.layer_bytes] = random.Random(seed * 1_000 + layer).randbytes(
            layout.layer_bytes
        )
    return data


def header_for(block: BlockIdentity, payload: bytearray, ttl_s: float | None = None) -> BlockHeader:
    return header_of(block, LAYOUT, payload, writer_boot=BOOT, ttl_s=ttl_s, now_ms=NOW_MS)


def encoded(block: BlockIdentity, payload: bytearray) -> bytes:
    return encode(header_for(block, payload))
