"""The header of a stored block, as bytes; the same on every tier and in every version that says so.

Little endian, no padding between fields:

    magic "WRKB" | version u16 | flags u16 | header bytes u32 | 0 u32 | payload bytes u64
    key 16 | parent 16 | namespace 16 | scope 16 | layout fingerprint 16
    index u32 | public cut blocks u32 | tokens n u32 | layers L u32 | kv heads u32 | head dim u32
    dtype 16 (ASCII, zeros behind) | created ms u64 | expires ms u64 (0: never) | writer's boot u64
    token ids n x u32 | layer checksums L x 8 (xxh3_64, canonical) | mac 16 | header checksum 8

The checksum at the end covers all before it, the MAC all before itself. Tokens are prompt text:
a header is as secret as a prompt. Golden vectors in tests/kvstore keep the bytes as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xxhash import xxh3_64_digest

from kvstore.errors import BadBlockError, Reason
from kvstore.identity import BlockIdentity, BlockKey
from kvstore.layout import MAX_BLOCK_TOKENS, MAX_LAYERS, Layout
from kvstore.sums import SUM_BYTES, Buffer, layer_sums

MAGIC = b"WRKB"
VERSION = 1
MAC_BYTES = 16
_HAS_MAC = 1
_FIXED = struct.Struct("<4sHHIIQ16s16s16s16s16sIIIIII16sQQQ")
_LAYERS_AT = 116
_TAIL_BYTES = MAC_BYTES + SUM_BYTES
MAX_HEADER_BYTES = _FIXED.size + 4 * MAX_BLOCK_TOKENS + SUM_BYTES * MAX_LAYERS + _TAIL_BYTES


class Signed(NamedTuple):
    """Whatever one cluster wrote, in all its lives: blocks whose headers bear the key's MAC."""

    mac_key: bytes


Whose = bytes | Signed
"""Blocks of a namespace or scope, or of a cluster."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Who the block is, how it lies in memory, and what its bytes sum up to.

    `sums` holds the checksum of each layer with its padding, back to back. `expires_ms` is the end
    of the block's life on the wall clock (0: none), however often a store refreshes its own TTL.
    """

    block: BlockIdentity
    layout: bytes
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    payload_bytes: int
    created_ms: int
    expires_ms: int
    writer_boot: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class HeaderDraft:
    """A header without checksums, for a tier that makes them while it copies."""

    header: BlockHeader
    mac_key: bytes | None = None

    @property
    def scope(self) -> bytes:
        """Whose block it is."""
        return self.header.block.scope

    @property
    def layers(self) -> int:
        """How many checksums are missing."""
        return self.header.layers

    def finished(self, sums: bytes) -> bytes:
        """The header's bytes."""
        return encode(self.header, self.mac_key, sums)


def header_of(
    block: BlockIdentity,
    layout: Layout,
    payload: Buffer,
    writer_boot: int,
    ttl_s: float | None = None,
    now_ms: int | None = None,
) -> BlockHeader:
    """The header of a block that is complete in memory. Raises ValueError on a wrong size."""
    if memoryview(payload).nbytes != layout.payload_bytes:
        raise ValueError(f"a block of this layout has {layout.payload_bytes} bytes")
    header = unsummed(block, layout, writer_boot, ttl_s, now_ms)
    return replace(header, sums=layer_sums(payload, layout.layers))


def unsummed(
    block: BlockIdentity,
    layout: Layout,
    writer_boot: int,
    ttl_s: float | None = None,
    now_ms: int | None = None,
) -> BlockHeader:
    """A header without checksums. Raises ValueError where the block has not as many tokens."""
    if len(block.tokens) != 4 * layout.block_tokens:
        raise ValueError(f"a block of this layout has {layout.block_tokens} tokens")
    created_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return BlockHeader(
        block=block,
        layout=layout.fingerprint,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        payload_bytes=layout.payload_bytes,
        created_ms=created_ms,
        expires_ms=0 if ttl_s is None else created_ms + max(1, int(ttl_s * 1_000)),
        writer_boot=writer_boot,
        sums=b"",
    )


def encoded_bytes(tokens: int, layers: int) -> int:
    """How long the header of a block of so many tokens and layers is."""
    return _FIXED.size + 4 * tokens + SUM_BYTES * layers + _TAIL_BYTES


def header_mac(mac_key: bytes, data: Buffer) -> bytes:
    """What only holders of `mac_key` can write over a header's bytes."""
    return hashlib.blake2b(data, digest_size=MAC_BYTES, key=mac_key, person=b"wr-header-1").digest()


def encode(header: BlockHeader, mac_key: bytes | None = None, sums: bytes | None = None) -> bytes:
    """The header as bytes, with a MAC where the tier is shared with other hosts; with other `sums`
    than its own where they are given."""
    block = header.block
    tokens = len(block.tokens) // 4
    total = encoded_bytes(tokens, header.layers)
    fixed = _FIXED.pack(
        *(MAGIC, VERSION, 0 if mac_key is None else _HAS_MAC, total, 0, header.payload_bytes),
        *(block.key, block.parent, block.namespace, block.scope, header.layout),
        *(block.index, block.public_cut_blocks, tokens),
        *(header.layers, header.kv_heads, header.head_dim, header.dtype.encode()),
        *(header.created_ms, header.expires_ms, header.writer_boot),
    )
    data = fixed + block.tokens + (header.sums if sums is None else sums)
    data += bytes(MAC_BYTES) if mac_key is None else header_mac(mac_key, data)
    return data + xxh3_64_digest(data)


def header_bytes(data: Buffer) -> int:
    """How long the header is that begins with `data` (12 bytes do). Raises BadBlockError."""
    if len(data) < 12:
        raise BadBlockError(Reason.TRUNCATED)
    magic, version, _, total = struct.unpack_from("<4sHHI", data)
    if magic != MAGIC:
        raise BadBlockError(Reason.MAGIC)
    if version != VERSION:
        raise BadBlockError(Reason.VERSION)
    if not _FIXED.size + _TAIL_BYTES <= total <= MAX_HEADER_BYTES:
        raise BadBlockError(Reason.MALFORMED)
    return int(total)


def layers_of(data: Buffer) -> int:
    """How many layers a header speaks of that was decoded before."""
    (layers,) = struct.unpack_from("<I", data, _LAYERS_AT)
    return int(layers)


@dataclass(frozen=True, slots=True)
class Label:
    """What whoever keeps a block without using it needs of its header."""

    key: bytes
    namespace: bytes
    scope: bytes
    payload_bytes: int


def label_of(data: Buffer) -> Label:
    """As `decode` in what it refuses, for a quarter of the time. Raises BadBlockError."""
    fields = _fields(_whole(data))
    return Label(fields[6], fields[8], fields[9], fields[5])


def decode(data: Buffer, mac_key: bytes | None = None) -> BlockHeader:
    """The header in `data`, which must hold it and nothing more. Raises BadBlockError.

    With a `mac_key` a header without MAC is refused.
    """
    raw = _whole(data)
    if mac_key is not None:
        _check_mac(raw, mac_key)
    return _header(raw)


def belongs(start: bytes, whose: Whose) -> bool:
    """Whether a block that begins so is theirs; False for what is no block."""
    try:
        raw = start[: header_bytes(start)]
        if isinstance(whose, Signed):
            decode(raw, whose.mac_key)
            return True
        block = decode(raw).block
    except BadBlockError:
        return False
    return whose in (block.namespace, block.scope)


def _whole(data: Buffer) -> bytes:
    if header_bytes(data) != len(data):
        raise BadBlockError(Reason.TRUNCATED)
    raw = bytes(data)
    if xxh3_64_digest(raw[:-SUM_BYTES]) != raw[-SUM_BYTES:]:
        raise BadBlockError(Reason.HEADER_SUM)
    return raw


def _check_mac(raw: bytes, mac_key: bytes) -> None:
    (flags,) = struct.unpack_from("<H", raw, 6)
    signed, mac = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:-SUM_BYTES]
    if not flags & _HAS_MAC or not hmac.compare_digest(header_mac(mac_key, signed), mac):
        raise BadBlockError(Reason.MAC)


def _fields(raw: bytes) -> tuple[Any, ...]:
    """The fixed part, once it agrees with itself and with the length."""
    fields = _FIXED.unpack_from(raw)
    flags, total, zero, payload_bytes = fields[2:6]
    tokens, layers, dtype = fields[13], fields[14], fields[17]
    if flags & ~_HAS_MAC or zero:
        raise BadBlockError(Reason.VERSION)
    sums_at = _FIXED.size + 4 * tokens
    if not layers or not tokens or sums_at + SUM_BYTES * layers + _TAIL_BYTES != total:
        raise BadBlockError(Reason.MALFORMED)
    if payload_bytes % layers:
        raise BadBlockError(Reason.MALFORMED)
    if not dtype.isascii():
        raise BadBlockError(Reason.MALFORMED)
    return fields


def _header(raw: bytes) -> BlockHeader:
    fields = _fields(raw)
    payload_bytes = fields[5]
    key, parent, namespace, scope, layout = fields[6:11]
    index, cut, tokens, layers, kv_heads, head_dim = fields[11:17]
    dtype, created_ms, expires_ms, boot = fields[17:]
    sums_at = _FIXED.size + 4 * tokens
    identity = BlockIdentity(
        key=BlockKey(key),
        parent=parent,
        namespace=namespace,
        scope=scope,
        index=index,
        public_cut_blocks=cut,
        tokens=raw[_FIXED.size : sums_at],
    )
    return BlockHeader(
        block=identity,
        layout=layout,
        dtype=dtype.rstrip(b"\0").decode("ascii"),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        payload_bytes=payload_bytes,
        created_ms=created_ms,
        expires_ms=expires_ms,
        writer_boot=boot,
        sums=raw[sums_at:-_TAIL_BYTES],
    )
