"""Random numbers by counter: Philox4x32-10, keyed by seed, counted by position.

A number depends on (seed, position) alone: not on the batch, the step, or the replica that draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """uint32 words held as uint64: counter [rows, 4] under key [rows, 2] gives [rows, 4]."""
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _WORD) ^ c1 ^ k0,
            second & _LOW,
            (first >> _WORD) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position). Seeds count modulo 2**64."""
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    zero = np.zeros_like(position)
    words = philox(
        np.stack((position & _LOW, position >> _WORD, zero, zero), axis=1),
        np.stack((seed & _LOW, seed >> _WORD), axis=1),
    )
    return ((words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))) * 2.0**-53
