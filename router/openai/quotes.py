"""Counting a JSON text's quotation marks, which tells how many strings it holds: native where a
compiler is there, else its Python twin."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from configs.native import CompileError, NativeSource, declare, load_object

log = logging.getLogger(__name__)

KERNELS = NativeSource("quotes", Path(__file__).parent, ("quotes.cpp",))


def python_quotes(body: bytes) -> int:
    """Without a compiler."""
    if rb"\\" in body:
        body = body.replace(rb"\\", b"")
    return body.count(b'"') - body.count(rb"\"")


def native_quotes() -> Callable[[bytes], int]:
    """Compiled from quotes.cpp. Raises CompileError."""
    signatures = {"wr_quotes": [ctypes.c_char_p, ctypes.c_long]}
    count = declare(load_object(KERNELS, quick=True), signatures, ctypes.c_long).wr_quotes
    return lambda body: count(body, len(body))


@cache
def quotes_in() -> Callable[[bytes], int]:
    """Tells how many quotation marks of a JSON text begin or end a string."""
    try:
        return native_quotes()
    except CompileError as error:
        log.warning("no native count of strings, Python counts: %s", error)
        return python_quotes


if __name__ == "__main__":
    quotes_in()
