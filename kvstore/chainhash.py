"""A run of block keys, each hashed over the one before it: native where a compiler is there, else
its Python twin. Both do exactly the same, which a test holds them to.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import struct
from functools import cache
from pathlib import Path
from typing import Protocol

from configs.native import CompileError, NativeSource, declare, load_object

log = logging.getLogger(__name__)

HASH_VERSION = "wr-block-1"
KEY_BYTES = 16
KERNELS = NativeSource("chain", Path(__file__).parent, ("chain.cpp", "runs.cpp"), ("recent.h",))
PERSON = HASH_VERSION.encode().ljust(16, b"\0")
_PERSON = HASH_VERSION.encode()


class ChainHash(Protocol):
    """key = H(parent || n as u32 || tokens as u32 little endian), parent = the key before."""

    def __call__(self, cluster_key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
        """The keys of the full blocks of `tokens`, back to back."""


def keyed_hash(cluster_key: bytes, *parts: bytes) -> bytes:
    """H: 16 bytes, keyed with the cluster's secret."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, key=cluster_key, person=_PERSON)
    for part in parts:
        digest.update(part)
    return digest.digest()


def python_chain(cluster_key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
    """Without a compiler."""
    count = struct.pack("<I", block_bytes // 4)
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = keyed_hash(cluster_key, parent, count, tokens[start : start + block_bytes])
        keys.append(parent)
    return b"".join(keys)


def native_chain() -> ChainHash:
    """Compiled from chain.cpp. Raises CompileError."""
    data, number = ctypes.c_char_p, ctypes.c_long
    signatures = {"wr_chain": [data, number, data, data, data, number, number, data]}
    function = declare(load_object(KERNELS), signatures).wr_chain

    def run(cluster_key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
        blocks = len(tokens) // block_bytes
        keys = ctypes.create_string_buffer(KEY_BYTES * blocks)
        key_bytes = len(cluster_key)
        function(cluster_key, key_bytes, PERSON, parent, tokens, blocks, block_bytes, keys)
        return keys.raw

    return run


@cache
def chain_hash() -> ChainHash:
    """The fastest there is here; compiles it at the first call on a machine."""
    try:
        return native_chain()
    except CompileError as error:
        log.warning("no native chain of block keys, Python hashes them: %s", error)
        return python_chain


if __name__ == "__main__":
    chain_hash()
