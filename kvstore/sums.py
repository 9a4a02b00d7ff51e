"""Checksums of a block's layers: native where a compiler is there, else the xxhash package. Both do
exactly the same, which a test holds them to; neither holds the interpreter's lock for long.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

from configs.native import CompileError, NativeSource, address, declare, load_object

log = logging.getLogger(__name__)

SUM_BYTES = 8
KERNELS = NativeSource("sums", Path(__file__).parent, ("sums.cpp",))
_SHORT_BYTES = 240
"""Up to here XXH3 works in another way, which is left to the package."""

Buffer = bytes | bytearray | memoryview
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SumKernels:
    """`sums(payload, layers)`; `copied(into, payload, layers)` copies first, and sums up what has
    landed."""

    sums: Callable[[Bytes, int], bytes]
    copied: Callable[[Bytes, Bytes, int], bytes]


def _package_sums(payload: Bytes, layers: int) -> bytes:
    size, view = len(payload) // layers, payload.data
    return b"".join(
        [xxh3_64_digest(view[start : start + size]) for start in range(0, size * layers, size)]
    )


def _package_copied(into: Bytes, payload: Bytes, layers: int) -> bytes:
    np.copyto(into, payload)
    return _package_sums(into, layers)


PACKAGE = SumKernels(_package_sums, _package_copied)
"""Without a compiler, and for short layers."""


def native() -> SumKernels:
    """Compiled from sums.cpp. Raises CompileError."""
    pointer, number, sums_at = ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p
    signatures = {
        "wr_layer_sums": [pointer, number, number, sums_at],
        "wr_copy_sums": [pointer, pointer, number, number, sums_at],
    }
    library = declare(load_object(KERNELS), signatures)

    def sums(payload: Bytes, layers: int) -> bytes:
        size = len(payload) // layers
        if size <= _SHORT_BYTES:
            return _package_sums(payload, layers)
        found = ctypes.create_string_buffer(SUM_BYTES * layers)
        library.wr_layer_sums(address(payload), layers, size, found)
        return found.raw

    def copied(into: Bytes, payload: Bytes, layers: int) -> bytes:
        size = len(payload) // layers
        if size <= _SHORT_BYTES:
            return _package_copied(into, payload, layers)
        found = ctypes.create_string_buffer(SUM_BYTES * layers)
        library.wr_copy_sums(address(into), address(payload), layers, size, found)
        return found.raw

    return SumKernels(sums, copied)


@cache
def kernels() -> SumKernels:
    """The fastest there are here; compiles them at the first call on a machine."""
    try:
        return native()
    except CompileError as error:
        log.warning("no native checksums of KV blocks, the xxhash package makes them: %s", error)
        return PACKAGE


def layer_sums(payload: Buffer, layers: int) -> bytes:
    """The checksums of all layers of a payload, back to back: xxh3_64, canonical.

    Raises ValueError when the payload does not have so many equal layers.
    """
    array: Bytes = np.frombuffer(payload, np.uint8)
    _check(array, layers)
    return kernels().sums(array, layers)


def copy_sums(into: Bytes, payload: Bytes, layers: int) -> bytes:
    """Copies a payload and gives the checksums of what has landed. Raises ValueError."""
    _check(payload, layers)
    if into.shape != payload.shape:
        raise ValueError("the payload does not fit")
    return kernels().copied(into, payload, layers)


def _check(payload: Bytes, layers: int) -> None:
    if layers < 1 or not len(payload) or len(payload) % layers:
        raise ValueError("a payload is a number of equal layers")
