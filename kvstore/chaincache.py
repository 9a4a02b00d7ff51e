"""Runs of block keys that were worked out before: a known head costs a look-up a run.

A run is known by the key before it and by its tokens, so it is right wherever it is found; the key
before it depends on the tenant's salt, so nobody finds what another tenant has left here.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.chainhash import KEY_BYTES, chain_hash

RUN_BLOCKS = 64
MAX_RUNS = 4_096
"""Of 64 blocks of 16 tokens: 20 MB of token ids and keys."""


class ChainCache:
    """A ChainHash for one cluster key, bounded; the least recently used runs leave first."""

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
