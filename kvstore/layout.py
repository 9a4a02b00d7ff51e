"""How one block's KV lies in memory, on every tier: layer by layer, keys before values, each layer
at a 64-byte border, so that layer i can be checked and copied while i + 1 arrives.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from events.load import KVLayout

ALIGN_BYTES = 64
FINGERPRINT_BYTES = 16
MAX_LAYERS = 1_024
MAX_BLOCK_TOKENS = 1_024
_ORDER = b"wr-kv-1 [layer][K,V][token][head][dim]"
_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class Layout:
    """The memory of one block: [layers][2][block_tokens][kv_heads][head_dim] of `dtype`, each layer
    padded with zeros to ALIGN_BYTES.

    Raises ValueError when a number is out of range, or nobody knows the dtype.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rope: str

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"KV of dtype {self.dtype} can't be stored")
        if not (1 <= self.layers <= MAX_LAYERS and 1 <= self.block_tokens <= MAX_BLOCK_TOKENS):
            raise ValueError(f"a block has up to {MAX_LAYERS} layers and {MAX_BLOCK_TOKENS} tokens")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise ValueError("a layer without KV can't be stored")

    @classmethod
    def of(cls, layout: KVLayout) -> Layout:
        """Of what a replica says in its hello. Raises ValueError."""
        return cls(
            dtype=layout.dtype,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=layout.block_tokens,
            rope=layout.rope,
        )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ as soon as one layout's bytes can't be read as the other's."""
        numbers = (self.layers, self.kv_heads, self.head_dim, self.block_tokens)
        names = [_ORDER, self.dtype.encode(), self.rope.encode()]
        framed = b"".join(struct.pack("<I", len(name)) + name for name in names)
        digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"wr-layout-1")
        digest.update(framed + struct.pack("<4I", *numbers))
        return digest.digest()

    @cached_property
    def layer_bytes(self) -> int:
        """Keys and values of one layer, without padding."""
        values = 2 * self.block_tokens * self.kv_heads * self.head_dim
        return values * _ITEM_BYTES[self.dtype]

    @cached_property
    def stride_bytes(self) -> int:
        """From one layer's first byte to the next one's: all of it goes into the checksum."""
        return -(-self.layer_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @cached_property
    def payload_bytes(self) -> int:
        """One block."""
        return self.layers * self.stride_bytes

    def segment(self, layer: int) -> slice:
        """Where the layer lies in a payload, with its padding."""
        return slice(layer * self.stride_bytes, (layer + 1) * self.stride_bytes)
