"""Tensor encodings of GGUF files, and how each becomes float32. Knows nothing of files.

An encoding packs a fixed number of weights into a block of bytes. Every decoder takes the blocks of
a tensor as uint8 [blocks, block bytes] and gives float32 [blocks, block weights].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tensor encoding: `weights` values in `size` bytes."""

    name: str
    weights: int
    size: int
    decode: Callable[[Bytes], Floats]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves, then high halves, of the last axis."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte `at`, moved to bit 4."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _scaled(quants: NDArray[np.generic], scale: Floats) -> Floats:
    values = quants.astype(np.float32)
    values *= scale
    return values


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    wide = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _scaled(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Floats:
    values = _scaled(_nibbles(blocks[:, 4:]), _half(blocks, 0))
    values += _half(blocks, 2)
    return values


def _q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _scaled(quants.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Floats:
    values = _scaled(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0))
    values += _half(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Floats:
    return _scaled(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes, as [blocks, 8, 1] each."""
    first, second, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate((first & 63, (high & 15) | ((first >> 6) << 4)), axis=1)
    least = np.concatenate((second & 63, (high >> 4) | ((second >> 6) << 4)), axis=1)
    return scale.astype(np.float32)[..., None], least.astype(np.float32)[..., None]


def _k_affine(blocks: Bytes, quants: Bytes) -> Floats:
    """d * scale * q - dmin * least, over eight groups of 32."""
    scale, least = _k_scales(blocks[:, 4:16])
    values = _scaled(quants, _half(blocks, 0)[..., None] * scale)
    values -= _half(blocks, 2)[..., None] * least
    return values.reshape(len(blocks), 256)


def _q4_k(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _k_affine(blocks, quants.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & np.uint8(1)
    return _k_affine(blocks, low | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    return _scaled(quants.reshape(-1, 16, 16), scale[..., None]).reshape(-1, 256)


ENCODINGS: dict[int, Encoding] = {
    0: Encoding("F32", 1, 4, _f32),
    1: Encoding("F16", 1, 2, _f16),
    2: Encoding("Q4_0", 32, 18, _q4_0),
    3: Encoding("Q4_1", 32, 20, _q4_1),
    6: Encoding("Q5_0", 32, 22, _q5_0),
    7: Encoding("Q5_1", 32, 24, _q5_1),
    8: Encoding("Q8_0", 32, 34, _q8_0),
    12: Encoding("Q4_K", 256, 144, _q4_k),
    13: Encoding("Q5_K", 256, 176, _q5_k),
    14: Encoding("Q6_K", 256, 210, _q6_k),
    30: Encoding("BF16", 1, 2, _bf16),
}
"""By the number that GGUF gives them."""
