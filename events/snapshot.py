"""The whole digest on the wire: asked for chunk by chunk, frozen at one delta number.

Chunks are small enough for the bus and are decompressed into a bounded size.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import msgspec
import numpy as np

from events.digest import check_shape
from events.errors import WireError
from events.load import DigestShape
from events.wire import decode

CHUNK_RAW_BYTES = 128 * 1024
MAX_CHUNK_BYTES = 256 * 1024
"""Of one encoded chunk; its data is smaller still."""

MAX_REQUEST_BYTES = 64


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True):
    """Chunk 0 freezes the newest state; the others name the frozen state that they belong to."""

    chunk: int = 0
    generation: int = 0
    seq: int = 0


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True):
    """One part. `checksum` is the CRC-32 of the whole bit array, `data` zlib of this part."""

    generation: int
    seq: int
    shape: DigestShape
    index: int
    count: int
    data: bytes
    checksum: int


_requests = msgspec.msgpack.Decoder(SnapshotRequest)
_chunks = msgspec.msgpack.Decoder(SnapshotChunk)


def chunk_count(shape: DigestShape) -> int:
    """How many chunks a digest of this shape is sent in."""
    return -(-shape.total_bits // 8 // CHUNK_RAW_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class FrozenDigest:
    """The bits at one (generation, seq). `bits` is uint8 (shape.total_bits // 8,)."""

    generation: int
    seq: int
    shape: DigestShape
    bits: np.ndarray
    checksum: int

    @classmethod
    def of(cls, generation: int, seq: int, shape: DigestShape, bits: np.ndarray) -> FrozenDigest:
        """Freeze an array that nobody writes to any more."""
        return cls(generation, seq, shape, bits, zlib.crc32(bits.data))

    def chunk(self, index: int) -> SnapshotChunk:
        """Raises WireError when there is no such chunk."""
        count = chunk_count(self.shape)
        if not 0 <= index < count:
            raise WireError("no such chunk")
        raw = self.bits[index * CHUNK_RAW_BYTES : (index + 1) * CHUNK_RAW_BYTES]
        data = zlib.compress(raw.data, level=1)
        return SnapshotChunk(
            self.generation, self.seq, self.shape, index, count, data, self.checksum
        )


class SnapshotAssembly:
    """Puts the chunks of one frozen digest together, in order."""

    def __init__(self) -> None:
        self._first: SnapshotChunk | None = None
        self._parts: list[bytes] = []

    @property
    def next_request(self) -> SnapshotRequest:
        """What to ask for now."""
        if self._first is None:
            return SnapshotRequest()
        return SnapshotRequest(len(self._parts), self._first.generation, self._first.seq)

    def add(self, chunk: SnapshotChunk) -> FrozenDigest | None:
        """The digest once it is whole, else None. Raises WireError on a chunk that doesn't fit."""
        check_shape(chunk.shape)
        first = self._first or chunk
        if _frame(chunk) != _frame(first) or chunk.index != len(self._parts):
            raise WireError("the chunk belongs to another snapshot")
        if chunk.count != chunk_count(chunk.shape):
            raise WireError("the chunk count does not fit the digest")
        self._parts.append(_inflate(chunk.data, _raw_bytes(chunk.shape, chunk.index)))
        self._first = first
        return self._finish(first) if len(self._parts) == first.count else None

    def _finish(self, first: SnapshotChunk) -> FrozenDigest:
        bits = np.frombuffer(b"".join(self._parts), dtype=np.uint8)
        if zlib.crc32(bits.data) != first.checksum:
            raise WireError("the snapshot's checksum is wrong")
        return FrozenDigest(first.generation, first.seq, first.shape, bits, first.checksum)


def _frame(chunk: SnapshotChunk) -> tuple[int, int, DigestShape, int, int]:
    return chunk.generation, chunk.seq, chunk.shape, chunk.count, chunk.checksum


def _raw_bytes(shape: DigestShape, index: int) -> int:
    return min(CHUNK_RAW_BYTES, shape.total_bits // 8 - index * CHUNK_RAW_BYTES)


def _inflate(data: bytes, expected_bytes: int) -> bytes:
    """Never makes more than `expected_bytes`, whatever the stream claims. Raises WireError."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, expected_bytes)
    except zlib.error:
        raise WireError("a chunk that is not zlib") from None
    if len(raw) != expected_bytes or inflater.unconsumed_tail or inflater.unused_data:
        raise WireError("a chunk of the wrong size")
    return raw


def decode_request(data: bytes) -> SnapshotRequest:
    """Raises WireError."""
    return decode(_requests, data, MAX_REQUEST_BYTES)


def decode_chunk(data: bytes) -> SnapshotChunk:
    """Raises WireError."""
    return decode(_chunks, data, MAX_CHUNK_BYTES)
