"""The whole digest in chunks: assembled exactly, bounded, and never from two different states."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest

from events.errors import WireError
from events.load import DigestShape
from events.snapshot import (
    CHUNK_RAW_BYTES,
    MAX_CHUNK_BYTES,
    FrozenDigest,
    SnapshotAssembly,
    SnapshotChunk,
    SnapshotRequest,
    chunk_count,
    decode_chunk,
    decode_request,
)

SMALL = DigestShape(bits=1024, k=4)
LARGE = DigestShape(bits=8 * CHUNK_RAW_BYTES * 4, k=4)


def frozen(shape: DigestShape, seq: int = 7, seed: int = 0) -> FrozenDigest:
    bits = np.random.default_rng(seed).integers(0, 256, shape.bits // 8, dtype=np.uint8)
    return FrozenDigest.of(3, seq, shape, bits)


def changed(chunk: SnapshotChunk, **fields: object) -> SnapshotChunk:
    return msgspec.structs.replace(chunk, **fields)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_chunks_make_the_digest_again(shape: DigestShape) -> None:
    source, assembly, whole = frozen(shape), SnapshotAssembly(), None
    for index in range(chunk_count(shape)):
        assert whole is None
        request = decode_request(msgspec.msgpack.encode(assembly.next_request))
        assert request == (SnapshotRequest(index, 3, 7) if index else SnapshotRequest())
        sent = msgspec.msgpack.encode(source.chunk(request.chunk))
        assert len(sent) <= MAX_CHUNK_BYTES
        whole = assembly.add(decode_chunk(sent))
    assert whole is not None
    assert (whole.generation, whole.seq, whole.shape) == (3, 7, shape)
    assert (whole.bits == source.bits).all()


def test_chunks_of_two_states_are_never_mixed() -> None:
    assembly = SnapshotAssembly()
    assembly.add(frozen(LARGE, seq=7).chunk(0))
    for other in (frozen(LARGE, seq=8).chunk(1), frozen(LARGE, seed=1).chunk(1)):
        with pytest.raises(WireError):
            assembly.add(other)
    with pytest.raises(WireError):
        assembly.add(frozen(LARGE).chunk(2))


@pytest.mark.parametrize(
    "fields",
    [
        {"checksum": 0},
        {"count": 2},
        {"index": 1},
        {"data": b"not zlib"},
        {"data": b""},
        {"data": zlib.compress(bytes(64))},
        {"data": zlib.compress(bytes(1024))},
        {"data": zlib.compress(bytes(128)) + b"more"},
        {"shape": DigestShape(bits=1000, k=4)},
        {"shape": DigestShape(bits=1 << 40, k=4)},
    ],
)
def test_a_false_chunk_is_a_wire_error(fields: dict[str, object]) -> None:
    with pytest.raises(WireError):
        SnapshotAssembly().add(changed(frozen(SMALL).chunk(0), **fields))


def test_S1_a_zip_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(50_000_000), level=9)
    with pytest.raises(WireError):
        SnapshotAssembly().add(changed(frozen(SMALL).chunk(0), data=bomb))


def test_a_chunk_that_is_not_there() -> None:
    for index in (-1, 1, 10**9):
        with pytest.raises(WireError):
            frozen(SMALL).chunk(index)
