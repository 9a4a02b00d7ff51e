"""The replica's native kernels: which sources they are made of, and their signatures."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from configs.native import CompileError, NativeSource, declare, load_object

KERNELS = NativeSource(
    name="kernels",
    folder=Path(__file__).parent,
    sources=("layers.cpp", "attention.cpp"),
    headers=(
        "vec.h",
        "blocks.h",
        "tiles.h",
        "few.h",
        "products.h",
        "thin.h",
        "transpose.h",
        "softmax.h",
        "ahead.h",
        "single.h",
    ),
    flags=("-fopenmp",),
)


@cache
def load_library() -> ctypes.CDLL:
    """The kernels, compiled first where the cache lacks them. Raises CompileError."""
    pointer, long, flag, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
    signatures = {
        "wr_norm": [pointer] * 3 + [long] * 2 + [real, flag],
        "wr_rotate_and_store": [pointer] * 7 + [long] * 4 + [flag],
        "wr_pack": [pointer] * 2 + [long] * 2 + [flag],
        "wr_pack_blocks": [pointer] * 2 + [long] * 2 + [flag] * 2,
        "wr_columns": [pointer] * 3 + [long] * 2 + [flag] * 2,
        "wr_product": [pointer] * 4 + [long] * 4 + [flag] * 3,
        "wr_gate": [pointer] * 2 + [long] * 3 + [flag],
        "wr_add_thin": [pointer] * 4 + [long] * 3 + [flag] * 2,
        "wr_attend": [pointer] * 7 + [long] * 7 + [flag],
    }
    library = declare(load_object(KERNELS), signatures)
    return declare(library, {"wr_tiles": []}, flag)


if __name__ == "__main__":
    try:
        load_library()
    except CompileError as error:
        print(f"no native kernels, plain torch will be used: {error}")
