"""Writing small GGUF files for tests: plain metadata, float32 and float16 tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

Value = bool | int | float | str | list[str] | list[int]

ALIGNMENT = 32


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


def _row(name: str, array: np.ndarray, offset: int) -> bytes:
    """A row of the tensor table; GGUF lists the fastest dimension first."""
    shape = tuple(reversed(array.shape))
    kind = {"float32": 0, "float16": 1}[array.dtype.name]
    return (
        _string(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def _padded(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % ALIGNMENT)


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, np.ndarray]
) -> Path:
    """Write a GGUF 3 file and give its path back."""
    rows, data = b"", b""
    for name, array in tensors.items():
        rows += _row(name, array, len(data))
        data += _padded(array.tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(_padded(head + rows) + data)
    return path
