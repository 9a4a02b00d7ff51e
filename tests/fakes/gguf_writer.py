"""Writing small GGUF files for tests: plain metadata; tensors in float32, float16, or as blocks."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Value = bool | int | float | str | list[str] | list[int]

ALIGNMENT = 32
KINDS = {"float32": 0, "float16": 1, "Q4_1": 3, "Q8_0": 8}


@dataclass(frozen=True)
class Blocks:
    """A tensor that is encoded already: its encoding, its shape, its bytes."""

    encoding: str
    shape: tuple[int, ...]
    raw: bytes


Tensor = np.ndarray | Blocks


def q4_1(values: np.ndarray) -> Blocks:
    """Each 32 numbers of a row by a scale and a least value, with 4 bits a number."""
    groups = values.astype(np.float32).reshape(-1, 32)
    least = groups.min(1, keepdims=True).astype("<f2")
    scale = ((groups.max(1, keepdims=True) - least) / 15).astype("<f2")
    quants = np.rint((groups - least) / np.maximum(scale, np.float16(1e-4))).clip(0, 15)
    low, high = np.split(quants.astype(np.uint8), 2, axis=1)
    rows = np.concatenate((scale.view(np.uint8), least.view(np.uint8), low | high << 4), axis=1)
    return Blocks("Q4_1", values.shape, rows.tobytes())


def q8_0(values: np.ndarray) -> Blocks:
    """Each 32 numbers of a row by a scale, with 8 bits a number."""
    groups = values.astype(np.float32).reshape(-1, 32)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype("<f2")
    quants = np.rint(groups / np.maximum(scale, np.float16(1e-4))).clip(-127, 127)
    rows = np.concatenate((scale.view(np.uint8), quants.astype(np.int8).view(np.uint8)), axis=1)
    return Blocks("Q8_0", values.shape, rows.tobytes())


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A type number and the value; ints are u32, floats f32."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(type(value))


def _row(name: str, array: Tensor, offset: int) -> bytes:
    """A row of the tensor table; GGUF lists the fastest dimension first."""
    shape = tuple(reversed(array.shape))
    kind = KINDS[array.encoding if isinstance(array, Blocks) else array.dtype.name]
    return (
        _string(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def _padded(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % ALIGNMENT)


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Path:
    """Write a GGUF 3 file and give its path back."""
    rows, data = b"", b""
    for name, array in tensors.items():
        rows += _row(name, array, len(data))
        data += _padded(array.raw if isinstance(array, Blocks) else array.tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(_padded(head + rows) + data)
    return path
