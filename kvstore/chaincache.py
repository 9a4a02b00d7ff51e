"""Runs of block keys that were worked out before: a known head costs a look-up a run.

A run is known by the key before it and by its tokens, so it is right wherever it is found; the key
before it depends on the tenant's salt, so nobody finds what another tenant has left here.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import OrderedDict
from functools import cache

from configs.native import CompileError, declare, load_object
from kvstore.chainhash import KERNELS, KEY_BYTES, PERSON, ChainHash, chain_hash

RUN_BLOCKS = 64
SMALL_RUN_BLOCKS = 8
"""Where a run is not known: most of it may be."""
MAX_RUNS_BYTES = 32 * 1024 * 1024
MAX_RUNS = 4_096
"""Of 64 blocks of 16 tokens: 20 MB of token ids and keys."""


class NativeRuns:
    """A ChainHash for one cluster key, bounded; the least recently used runs leave first. Compiled
    from runs.cpp."""

    def __init__(
        self,
        run_blocks: int = RUN_BLOCKS,
        small_blocks: int = SMALL_RUN_BLOCKS,
        max_bytes: int = MAX_RUNS_BYTES,
    ) -> None:
        """Raises CompileError."""
        library = _library()
        seed = int.from_bytes(os.urandom(8), "little")
        self._native = library.wr_runs_new(run_blocks, small_blocks, max_bytes, seed)
        weakref.finalize(self, library.wr_runs_free, self._native)
        self._chain, self._bytes = library.wr_runs_chain, library.wr_runs_bytes

    @property
    def size_bytes(self) -> int:
        """Of all that is known."""
        size: int = self._bytes(self._native)
        return size

    def __call__(self, cluster_key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
        """The keys of the full blocks of `tokens`, back to back."""
        blocks = len(tokens) // block_bytes
        keys = bytes(KEY_BYTES * blocks)  # its own alone: filled before anybody sees it
        self._chain(
            self._native, cluster_key, len(cluster_key), PERSON, parent, tokens, blocks,
            block_bytes, keys,
        )  # fmt: skip
        return keys


@cache
def _library() -> ctypes.CDLL:
    pointer, long, data = ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p
    library = load_object(KERNELS, quick=True)
    chain = [pointer, data, long, data, data, data, long, long, data]
    declare(library, {"wr_runs_free": [pointer], "wr_runs_chain": chain})
    declare(library, {"wr_runs_new": [long, long, long, ctypes.c_uint64]}, pointer)
    return declare(library, {"wr_runs_bytes": [pointer]}, long)


def chain_cache() -> ChainHash:
    """The fastest there is here."""
    try:
        return NativeRuns()
    except CompileError:  # whoever hashes blocks has said so
        return ChainCache()


class ChainCache:
    """The same without a compiler."""

    def __init__(self, run_blocks: int = RUN_BLOCKS, max_runs: int = MAX_RUNS) -> None:
        self._run_blocks = run_blocks
        self._max_runs = max_runs
        self._runs: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._hash = chain_hash()

    def __len__(self) -> int:
        return len(self._runs)

    def __call__(self, cluster_key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
        """The keys of the full blocks of `tokens`, back to back."""
        size = self._run_blocks * block_bytes
        found, at = [], 0
        while at + size <= len(tokens):
            place = parent, tokens[at : at + size]
            keys = self._runs.get(place)
            if keys is None:
                break
            self._runs.move_to_end(place)
            found.append(keys)
            parent = keys[-KEY_BYTES:]
            at += size
        rest = tokens[at:] if at else tokens
        keys = self._hash(cluster_key, parent, rest, block_bytes)
        self._remember(parent, rest, keys, size)
        return b"".join((*found, keys))

    def _remember(self, parent: bytes, tokens: bytes, keys: bytes, size: int) -> None:
        step = self._run_blocks * KEY_BYTES
        for number in range(len(tokens) // size):
            run = keys[number * step : (number + 1) * step]
            self._runs[parent, tokens[number * size : (number + 1) * size]] = run
            parent = run[-KEY_BYTES:]
        while len(self._runs) > self._max_runs:
            self._runs.popitem(last=False)
