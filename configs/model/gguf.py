"""Reading a GGUF file: its metadata, its table of tensors, and tensors as float32.

The file is mapped, parsed once and checked in full before anything is handed out: every length is
held against the bytes that are left, so a malformed file costs an error, not memory. Knows nothing
of architectures or tokenizers.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.model.errors import ModelError
from configs.model.quant import ENCODINGS, Encoding

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4
MAX_DEPTH = 2

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` in row-major order, `offset` from the file's first byte."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    size_bytes: int


class _Cursor:
    """Bounded reads over the mapped bytes."""

    __slots__ = ("_data", "_end", "at")

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = len(data)
        self.at = 0

    def take(self, size: int) -> int:
        """Step over `size` bytes and give their start."""
        start = self.at
        if size > self._end - start:
            raise ModelError(f"truncated: {size} bytes needed at offset {start}")
        self.at = start + size
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self._data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._data, self.take(8))[0])

    def count(self, limit: int, what: str) -> int:
        count = self.u64()
        if count > limit:
            raise ModelError(f"{count} {what}, at most {limit} can be right")
        return count

    def string(self, limit: int | None = None) -> str:
        size = self.count(self._end if limit is None else limit, "bytes in a string")
        start = self.take(size)
        return self._data[start : start + size].decode("utf-8")

    def strings(self) -> list[str]:
        count = self.count((self._end - self.at) // 8, "strings in an array")
        data, end, at, unpack = self._data, self._end, self.at, _U64.unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            if start > end or (at := start + unpack(data, at)[0]) > end:
                raise ModelError(f"truncated: a string at offset {start} runs past the end")
            found.append(data[start:at].decode("utf-8"))
        self.at = at
        return found

    def scalars(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(dtype.itemsize * count)
        values: list[Any] = np.frombuffer(self._data[start : self.at], dtype, count).tolist()
        return values

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < MAX_DEPTH:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise ModelError(f"unknown value type {kind}")
        return self.scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        kind = self.u32()
        if kind == _STRING:
            return self.strings()
        count = self.count(self._end - self.at, "values in an array")
        if kind in _SCALARS:
            return self.scalars(kind, count)
        return [self.value(kind, depth) for _ in range(count)]


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string(MAX_NAME_BYTES)
        if key in found:
            raise ModelError(f"metadata key '{key}' occurs twice")
        found[key] = cursor.value(cursor.u32())
    return found


def _tensor(cursor: _Cursor) -> TensorInfo:
    """One row of the tensor table; its offset still counts from the start of the data."""
    name = cursor.string(MAX_NAME_BYTES)
    dims = cursor.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise ModelError(f"tensor '{name}' has {dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(dims)]))
    kind = cursor.u32()
    encoding = ENCODINGS.get(kind)
    if encoding is None:
        known = ", ".join(each.name for each in ENCODINGS.values())
        raise ModelError(f"tensor '{name}' has encoding {kind}; supported are {known}")
    if 0 in shape or shape[-1] % encoding.weights:
        raise ModelError(f"tensor '{name}' has shape {shape}, which {encoding.name} can't hold")
    size = prod(shape) // encoding.weights * encoding.size
    return TensorInfo(name, shape, encoding, cursor.u64(), size)


def _placed(tensors: list[TensorInfo], start: int, alignment: int, end: int) -> list[TensorInfo]:
    """The tensors with absolute offsets, checked to lie apart inside the file."""
    placed = []
    for info in tensors:
        offset = start + info.offset
        if info.offset % alignment or offset + info.size_bytes > end:
            raise ModelError(f"truncated or misplaced: tensor '{info.name}' at offset {offset}")
        placed.append(TensorInfo(info.name, info.shape, info.encoding, offset, info.size_bytes))
    placed.sort(key=lambda info: info.offset)
    for left, right in pairwise(placed):
        if left.offset + left.size_bytes > right.offset:
            raise ModelError(f"tensors '{left.name}' and '{right.name}' overlap")
    return placed


class GGUFFile:
    """A parsed GGUF file. `metadata` holds plain Python values; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the file is missing, malformed, truncated or not supported."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(self._data))
        except (OSError, ValueError, OverflowError) as error:
            raise ModelError(f"{path}: {error}") from error

    def _parse(self, cursor: _Cursor) -> None:
        start = cursor.take(4)
        if self._data[start : start + 4] != MAGIC:
            raise ModelError("not a GGUF file")
        version = cursor.u32()
        if version not in VERSIONS:
            raise ModelError(
                f"GGUF version {version} is not supported (only little-endian 2 and 3)"
            )
        tensors = cursor.count(MAX_TENSORS, "tensors")
        self.metadata = _metadata(cursor, cursor.count(MAX_KEYS, "metadata keys"))
        table = [_tensor(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ModelError(f"general.alignment is {alignment!r}")
        data_start = -(-cursor.at // alignment) * alignment
        placed = _placed(table, data_start, alignment, len(self._data))
        self.tensors = {info.name: info for info in placed}
        if len(self.tensors) != len(table):
            raise ModelError("two tensors have the same name")

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The encoded tensor as uint8 [blocks, block bytes], a read-only view of the file."""
        info = self.info(name)
        raw = np.frombuffer(self._data, np.uint8, info.size_bytes, info.offset)
        return raw.reshape(-1, info.encoding.size)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32 in its row-major shape. Raises ModelError when there is none."""
        info = self.info(name)
        with np.errstate(invalid="ignore", over="ignore"):
            return info.encoding.decode(self.blocks(name)).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        """Where and how the tensor lies. Raises ModelError when there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: no tensor '{name}'") from None
