"""Which prefixes are hot: the share of recent requests whose prompts go through them.

A prefix that most requests share must not pull all of them to its first holder: it deserves as many
holders as its share of the traffic. Watched are the places where prompts were seen to part from
what was known; counted over the last requests, so that no clock is needed. Native where a compiler
is there, else its twin; a test holds them to the same.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from configs.native import CompileError, NativeSource, declare, load_object
from kvstore.identity import KEY_BYTES, KeyChain

log = logging.getLogger(__name__)

KERNELS = NativeSource("heat", Path(__file__).parent, ("heat.cpp",))

T = TypeVar("T")

WINDOW_REQUESTS = 256
HOT_REQUESTS = 8
MAX_DEPTHS = 64


_NOTHING = slice(0, 0)
"""No key; with two of them whatever is cut out is a tuple."""


class _Seen(Struct, frozen=True):
    """The watched prefixes that one request went through, and the depth that it watches itself."""

    keys: tuple[bytes, ...]
    depth: int


class Heat(Protocol):
    """A sliding window over the last requests."""

    def note(self, chain: KeyChain, shared_blocks: int) -> None:
        """One more request, whose first `shared_blocks` blocks were known somewhere."""

    def hot(self, chain: KeyChain, shared_blocks: int) -> bool:
        """Whether many requests went through the first `shared_blocks`; of none, and of more than
        there are, nobody did."""

    def holders_deserved(self, chain: KeyChain, shared_blocks: int, replicas: int) -> int:
        """How many of `replicas` should hold the first `shared_blocks`; 0 while they aren't hot."""


class NativeHeat:
    """Compiled from heat.cpp."""

    def __init__(self, library: ctypes.CDLL, window: int = WINDOW_REQUESTS) -> None:
        heat = library.wr_heat(window, MAX_DEPTHS)
        weakref.finalize(self, library.wr_cool, heat)
        self._note = partial(library.wr_note, heat)
        self._count = partial(library.wr_count, heat)
        self._recent = partial(library.wr_recent, heat)

    def note(self, chain: KeyChain, shared_blocks: int) -> None:
        self._note(chain.data, chain.blocks, shared_blocks)

    def hot(self, chain: KeyChain, shared_blocks: int) -> bool:
        found: int = self._count(chain.data, chain.blocks, shared_blocks)
        return found >= HOT_REQUESTS

    def holders_deserved(self, chain: KeyChain, shared_blocks: int, replicas: int) -> int:
        if not shared_blocks or not self.hot(chain, shared_blocks):
            return 0
        return round(
            replicas * self._count(chain.data, chain.blocks, shared_blocks) / self._recent()
        )


class PlainHeat:
    """The same without a compiler."""

    def __init__(self, window: int = WINDOW_REQUESTS) -> None:
        self._recent: deque[_Seen] = deque(maxlen=window)
        self._counts: Counter[bytes] = Counter()
        self._depths: Counter[int] = Counter()
        self._cuts: dict[int, slice] = {}
        self._cut: Callable[[bytes], tuple[bytes, ...]] | None = None

    def note(self, chain: KeyChain, shared_blocks: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._forget(self._recent[0])
        data, counts = chain.data, self._counts
        # All watched depths are cut out in one go.
        cut = self._cut or self._new_cut()
        keys = list(filter(counts.__contains__, cut(data)))
        depth = shared_blocks
        if depth not in self._depths and len(self._depths) >= MAX_DEPTHS:
            depth = 0
        if depth and (own := data[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]) not in keys:
            keys.append(own)
        if depth not in self._cuts:
            # A cut that lies behind a chain's end, or before its start, yields no key.
            self._cuts[depth] = slice(max(0, depth - 1) * KEY_BYTES, depth * KEY_BYTES)
            self._cut = None
        self._depths[depth] += 1
        for key in keys:
            counts[key] += 1
        self._recent.append(_Seen(tuple(keys), depth))

    def hot(self, chain: KeyChain, shared_blocks: int) -> bool:
        key = chain.data[(shared_blocks - 1) * KEY_BYTES : shared_blocks * KEY_BYTES]
        return key in self._counts and self._counts[key] >= HOT_REQUESTS

    def holders_deserved(self, chain: KeyChain, shared_blocks: int, replicas: int) -> int:
        if not shared_blocks or not self.hot(chain, shared_blocks):
            return 0
        count = self._counts[chain[shared_blocks - 1]]
        return round(replicas * count / len(self._recent))

    def _new_cut(self) -> Callable[[bytes], tuple[bytes, ...]]:
        self._cut = itemgetter(_NOTHING, _NOTHING, *self._cuts.values())
        return self._cut

    def _forget(self, seen: _Seen) -> None:
        _take(self._depths, seen.depth)
        if seen.depth not in self._depths:
            del self._cuts[seen.depth]
            self._cut = None
        for key in seen.keys:
            _take(self._counts, key)


def _take(counts: Counter[T], item: T) -> None:
    counts[item] -= 1
    if not counts[item]:
        del counts[item]


def native_heat(window: int = WINDOW_REQUESTS) -> Heat:
    """Compiled from heat.cpp. Raises CompileError."""
    return NativeHeat(_library(), window)


@cache
def _library() -> ctypes.CDLL:
    pointer, long = ctypes.c_void_p, ctypes.c_long
    library = load_object(KERNELS, quick=True)
    declare(library, {"wr_cool": [pointer], "wr_note": [pointer, pointer, long, long]})
    declare(library, {"wr_heat": [long, long]}, result=pointer)
    counts = {"wr_count": [pointer, pointer, long, long], "wr_recent": [pointer]}
    return declare(library, counts, result=long)


def prefix_heat() -> Heat:
    """The fastest there is here; compiles it at the first call on a machine."""
    try:
        return native_heat()
    except CompileError as error:
        log.warning("no native heat of prefixes: %s", error)
        return PlainHeat()


if __name__ == "__main__":
    prefix_heat()
