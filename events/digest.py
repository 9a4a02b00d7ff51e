"""The digest: which bits a replica's resident keys set, and how changes of them are told.

The replica counts per bit position, so evictions are unlearned exactly; readers hold plain bits.
Both ends make positions here. Knows nothing of subjects, replicas or boots.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from events.errors import InvariantError, WireError
from events.load import DigestShape

MIN_DIGEST_BITS = 64
MAX_DIGEST_BITS = 1 << 26
MAX_DIGEST_K = 32
MAX_COLUMNS = 3
MAX_DELTA_POSITIONS = 64 * 1024
"""Of one delta, set and clear together: 256 KB."""

STUCK = 255

Halves = np.ndarray
"""Block keys as uint64, shape (keys, 2): see kvstore.identity.KeyChain.halves."""


class DigestDelta(msgspec.Struct, frozen=True, array_like=True):
    """Positions (u32 little endian) that became set, and that became clear; disjoint."""

    set: bytes
    clear: bytes

    def positions(self, bits: int) -> tuple[np.ndarray, np.ndarray]:
        """(set, clear) as uint32. Raises WireError on a ragged buffer or a position >= bits."""
        return _positions_of(self.set, bits), _positions_of(self.clear, bits)


def _positions_of(data: bytes, bits: int) -> np.ndarray:
    if len(data) % 4 or len(data) > 4 * MAX_DELTA_POSITIONS:
        raise WireError(f"a delta of {len(data)} bytes is not a list of positions")
    found = np.frombuffer(data, dtype="<u4")
    if found.size and int(found.max()) >= bits:
        raise WireError("a delta names a position outside the digest")
    return found


def check_shape(shape: DigestShape) -> DigestShape:
    """The shape itself. Raises WireError when no digest can have it."""
    bits, k = shape.bits, shape.k
    if not 1 <= shape.columns <= MAX_COLUMNS:
        raise WireError(f"a digest has 1 to {MAX_COLUMNS} columns")
    if not MIN_DIGEST_BITS <= bits <= MAX_DIGEST_BITS or bits & (bits - 1):
        raise WireError("digest bits must be a power of two within the limits")
    if not 1 <= k <= MAX_DIGEST_K:
        raise WireError(f"digest k must be 1 to {MAX_DIGEST_K}")
    return shape


def positions(halves: Halves, shape: DigestShape) -> np.ndarray:
    """Bit positions of keys: uint64 (n, 2) to uint32 (n, k), by double hashing.

    h1 + i * h2 modulo a power of two, h2 odd: an odd step runs through every residue, so the k
    positions of one key are distinct and each counts once.
    """
    step = halves[:, 1] | np.uint64(1)
    walk = halves[:, :1] + np.arange(shape.k, dtype=np.uint64) * step[:, None]
    return (walk & np.uint64(shape.bits - 1)).astype(np.uint32)


def halves_of(keys: Iterable[bytes]) -> Halves:
    """16-byte keys as uint64 (n, 2)."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)


def fitting_shape(shape: DigestShape, keys: int, bound: float) -> DigestShape:
    """`shape`, doubled until `keys` keys are expected to stay under half of `bound`."""
    bits = shape.bits
    while bits < MAX_DIGEST_BITS and expected_rate(bits, shape.k, keys) > bound / 2:
        bits *= 2
    return msgspec.structs.replace(shape, bits=bits)


def expected_rate(bits: int, k: int, keys: int) -> float:
    """False positives expected of a digest with so many keys, by the textbook formula."""
    return float((1.0 - np.exp(-k * keys / bits)) ** k)


class CountingDigest:
    """Counts per position (the truth), and the bits as last told to readers.

    Counters are 8 bit and saturate: one that reaches 255 can't know any more how many keys it
    counts, so it stays (a false positive at worst; clearing it could hide a resident key) until
    the digest is rebuilt from its keys. At a sane fill that never happens.
    """

    def __init__(self, shape: DigestShape) -> None:
        self.shape = check_shape(shape)
        self._counts = np.zeros(shape.bits, dtype=np.uint8)
        self._told = np.zeros(shape.bits, dtype=np.bool_)
        self._touched: list[np.ndarray] = []
        self._touched_size = 0
        self._set_bits = 0

    @classmethod
    def grown(cls, shape: DigestShape, keys: Halves) -> CountingDigest:
        """A new generation that starts with `keys` already told."""
        digest = cls(shape)
        digest.store(keys)
        digest.take_delta()
        return digest

    @property
    def stuck(self) -> int:
        """How many counters are saturated."""
        return int(np.count_nonzero(self._counts == STUCK))

    @property
    def false_positive_rate(self) -> float:
        """Chance that an absent key looks resident, from the actual fill."""
        return float((self._set_bits / self.shape.bits) ** self.shape.k)

    def store(self, keys: Halves) -> None:
        """Count these keys in; a key counts as often as it is stored."""
        where, times = self._tally(keys)
        before = self._counts[where]
        after = np.minimum(before + times, STUCK)
        self._replace(where, before, after)

    def remove(self, keys: Halves) -> None:
        """Count these keys out. Raises InvariantError, unchanged, if they were never stored."""
        where, times = self._tally(keys)
        before = self._counts[where]
        if bool(np.any((before < times) & (before != STUCK))):
            raise InvariantError("a key leaves the digest that was never in it")
        after = np.where(before == STUCK, STUCK, before - times)
        self._replace(where, before, after)

    def clear(self) -> None:
        """No key is resident any more."""
        where = np.flatnonzero(self._counts)
        self._touch(where)
        self._counts[where] = 0
        self._set_bits = 0

    def take_delta(self) -> tuple[np.ndarray, np.ndarray]:
        """(set, clear): net changes since the last call, uint32, sorted."""
        if not self._touched:
            return np.empty(0, np.uint32), np.empty(0, np.uint32)
        touched = np.unique(np.concatenate(self._touched))
        self._touched, self._touched_size = [], 0
        now, told = self._counts[touched] > 0, self._told[touched]
        self._told[touched] = now
        return touched[now & ~told].astype(np.uint32), touched[told & ~now].astype(np.uint32)

    def snapshot(self) -> np.ndarray:
        """The bits as of the last `take_delta`: uint8 (bits // 8,), little bit order."""
        return np.packbits(self._told, bitorder="little")

    def _tally(self, keys: Halves) -> tuple[np.ndarray, np.ndarray]:
        where, times = np.unique(positions(keys, self.shape), return_counts=True)
        return where, times

    def _replace(self, where: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        flipped = (before > 0) != (after > 0)
        self._counts[where] = after
        self._set_bits += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        self._touch(where[flipped])

    def _touch(self, where: np.ndarray) -> None:
        self._touched.append(where)
        self._touched_size += where.size
        if self._touched_size > self.shape.bits:
            self._touched = [np.unique(np.concatenate(self._touched))]
            self._touched_size = self._touched[0].size


def split_delta(became_set: np.ndarray, became_clear: np.ndarray) -> list[DigestDelta]:
    """A net change as messages of bounded size, in order; none when nothing changed.

    A reader that has only some of them is merely between two states, like between two ticks.
    """
    half = MAX_DELTA_POSITIONS // 2
    steps = range(0, max(became_set.size, became_clear.size), half)
    return [
        DigestDelta(
            _pack(became_set[start : start + half]), _pack(became_clear[start : start + half])
        )
        for start in steps
    ]


def _pack(found: np.ndarray) -> bytes:
    return found.astype("<u4").tobytes()
