"""Chains that slots are promised, in a radix tree: native where a compiler is there, else its twin.

A node for each run of blocks that the same promises go through, so that neither a promise nor a
look-up costs more than the places where chains part. Both do exactly the same, which a test holds
them to.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from configs.native import CompileError, NativeSource, address, declare, load_object
from kvstore.identity import KEY_BYTES

log = logging.getLogger(__name__)

KERNELS = NativeSource("promises", Path(__file__).parent, ("promises.cpp",))

Leaf = Any
"""Where a promise ends: for `take_back` alone."""


class PromiseTree(Protocol):
    """Chains are their keys, back to back, and how many there are; never empty. `kept`: one number,
    of keys; what chains share is kept once. `at`: the native look-up and its tree, as
    router/choice/survey.cpp calls it."""

    kept: Sequence[int]
    at: tuple[int, int] | None

    def promise(self, keys: bytes, blocks: int, slot: int, /) -> Leaf:
        """The slot will hold the chain."""

    def take_back(self, leaf: Leaf, slot: int, /) -> None:
        """A promise of the slot is over."""

    def promised(self, keys: bytes, blocks: int, rows: np.ndarray, depths: np.ndarray) -> None:
        """How much of the chain each slot is promised: `depths` (int32) become no less, at the row
        of each slot; `rows`: int32, by slot, -1 for none."""


class NativeTree:
    """Compiled from promises.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        count = np.zeros(1, np.int64)
        tree = library.wr_tree(address(count))
        weakref.finalize(self, library.wr_free, tree)
        self.kept: Sequence[int] = memoryview(count)
        self._promised = partial(library.wr_promised, tree)
        self.promise = partial(library.wr_promise, tree)
        self.take_back = partial(library.wr_take_back, tree)
        code = ctypes.cast(library.wr_promised, ctypes.c_void_p).value
        assert code is not None
        self.at: tuple[int, int] | None = (code, tree)

    def promised(self, keys: bytes, blocks: int, rows: np.ndarray, depths: np.ndarray) -> None:
        self._promised(keys, blocks, address(rows), address(depths))


class _Node:
    """A run of blocks, from the `start`-th of every chain through it.

    `head` is the key of its first block, `end` the depth behind its last one. `held` counts the
    promises through it by slot, `ends` those whose chain ends here."""

    __slots__ = ("children", "end", "ends", "head", "held", "keys", "parent", "start")

    def __init__(self, parent: _Node | None, start: int, keys: bytes) -> None:
        self.place(parent, start, keys)
        self.children: dict[bytes, _Node] = {}
        self.held: dict[int, int] = {}
        self.ends = 0

    def place(self, parent: _Node | None, start: int, keys: bytes) -> None:
        """Where it is in the tree, and which run it has."""
        self.parent = parent
        self.start = start
        self.keys = keys
        self.head = keys[:KEY_BYTES]
        self.end = start + len(keys) // KEY_BYTES

    def agrees_to(self, data: bytes) -> int:
        """The depth up to which a chain with the same head agrees: where two chains have an equal
        key, all before it is equal too, so the search bisects."""
        keys, start = self.keys, self.start * KEY_BYTES
        low, high = 1, min(len(keys), len(data) - start) // KEY_BYTES
        probe = high
        while low < high:
            at = (probe - 1) * KEY_BYTES
            if keys[at : at + KEY_BYTES] == data[start + at : start + at + KEY_BYTES]:
                low = probe
            else:
                high = probe - 1
            probe = low + (high - low + 1) // 2
        return self.start + low


class PlainTree:
    """The same without a compiler."""

    def __init__(self) -> None:
        self.at: tuple[int, int] | None = None
        self.kept = [0]
        self._root = _Node(None, 0, b"")

    def promise(self, keys: bytes, blocks: int, slot: int, /) -> Leaf:
        leaf = node = self._leaf(keys, blocks)
        leaf.ends += 1
        while node.parent is not None:
            node.held[slot] = node.held.get(slot, 0) + 1
            node = node.parent
        return leaf

    def take_back(self, leaf: Leaf, slot: int, /) -> None:
        """Off its whole way, and off the tree what nobody else goes through."""
        node: _Node = leaf
        node.ends -= 1
        while node.parent is not None:
            node.held[slot] -= 1
            if not node.held[slot]:
                del node.held[slot]
            if not node.held:
                del node.parent.children[node.head]
                self.kept[0] -= node.end - node.start
            elif not node.ends and len(node.children) == 1:
                _merge(node)
            node = node.parent

    def promised(self, keys: bytes, blocks: int, rows: np.ndarray, depths: np.ndarray) -> None:
        node, depth = self._search(keys, blocks)
        while node.parent is not None:
            at = rows[list(node.held)]
            at = at[at >= 0]
            depths[at] = np.maximum(depths[at], depth)
            depth, node = node.start, node.parent

    def _search(self, keys: bytes, blocks: int) -> tuple[_Node, int]:
        """The last node on the chain's way, and the depth up to which they agree."""
        node, depth = self._root, 0
        while depth < blocks:
            child = node.children.get(keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            if child is None:
                break
            node, depth = child, child.agrees_to(keys)
            if depth < child.end:
                break
        return node, depth

    def _leaf(self, keys: bytes, blocks: int) -> _Node:
        """The node that ends where the chain ends; made where there is none."""
        node, depth = self._search(keys, blocks)
        if depth < node.end:
            node = _split(node, depth)
        if depth == blocks:
            return node
        leaf = _Node(node, depth, keys[depth * KEY_BYTES :])
        node.children[leaf.head] = leaf
        self.kept[0] += blocks - depth
        return leaf


def _split(node: _Node, depth: int) -> _Node:
    """Cut a node in two; the new one is the upper part, so that promises keep their ends."""
    parent, cut = node.parent, (depth - node.start) * KEY_BYTES
    assert parent is not None
    upper = _Node(parent, node.start, node.keys[:cut])
    upper.held = dict(node.held)
    node.place(upper, depth, node.keys[cut:])
    upper.children[node.head] = node
    parent.children[upper.head] = upper
    return upper


def _merge(node: _Node) -> None:
    """Put a node in front of its only child, where all its promises go on."""
    parent, (child,) = node.parent, node.children.values()
    assert parent is not None
    child.place(parent, node.start, node.keys + child.keys)
    parent.children[child.head] = child


def native_tree() -> PromiseTree:
    """Compiled from promises.cpp. Raises CompileError."""
    return NativeTree(promise_kernels())


@cache
def promise_kernels() -> ctypes.CDLL:
    """Those of `NativeTree`. Raises CompileError."""
    pointer, long, slot = ctypes.c_void_p, ctypes.c_long, ctypes.c_int32
    library = load_object(KERNELS, quick=True)
    nothing = {
        "wr_free": [pointer],
        "wr_take_back": [pointer, pointer, slot],
        "wr_promised": [pointer, pointer, long, pointer, pointer],
    }
    made = {"wr_tree": [pointer], "wr_promise": [pointer, pointer, long, slot]}
    declare(library, nothing)
    return declare(library, made, result=pointer)


def promise_tree() -> PromiseTree:
    """The fastest there is here; compiles it at the first call on a machine."""
    try:
        return native_tree()
    except CompileError as error:
        log.warning("no native tree of promises: %s", error)
        return PlainTree()


if __name__ == "__main__":
    promise_tree()
