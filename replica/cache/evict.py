"""In which order idle cached blocks would go. Every order here is prefix-closed without any search.

Requests give their blocks back from tail to head, and whoever holds a block holds all blocks before
it. So within one queue a node always enters behind every descendant that is in it. A node that was
used again has only ancestors that were used again, so it never outlasts one of them either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from configs.schema import Eviction
from replica.cache.node import Node

PROTECTED_SHARE = 0.5
"""Of the pool: how many blocks that were used again outlast those that were not."""


class EvictionOrder(Protocol):
    """Idle nodes, next to be evicted first; every operation takes constant time on average."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Node]: ...

    def __contains__(self, node: Node) -> bool: ...

    def push(self, nodes: Sequence[Node]) -> None:
        """They were used last, tails before heads."""

    def remove(self, nodes: Sequence[Node]) -> None:
        """They are in use again, or gone. Raises KeyError when one is not here."""

    def first(self) -> Node:
        """The one to evict. Raises StopIteration when empty."""


class LruQueue:
    """The least recently used first. An OrderedDict: the first of a plain dict is searched for
    behind all that left before it."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def push(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        listed = self._nodes
        for node in nodes:
            listed[node] = None

    def remove(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        listed = self._nodes
        for node in nodes:
            del listed[node]

    def discard(self, nodes: Sequence[Node]) -> list[Node]:
        """Remove those that are here; gives the others."""
        pop = self._nodes.pop
        return [node for node in nodes if pop(node, node) is not None]

    def first(self) -> Node:
        """See EvictionOrder."""
        return next(iter(self._nodes))


class SegmentedQueue:
    """Segmented LRU (Karedla, Love and Wherry 1994): prompts that nobody repeats, however many,
    push out only each other and what `protected_blocks` blocks that were used again leave of the
    pool. What is pushed out of the protected segment gets one more round in the other."""

    def __init__(self, protected_blocks: int) -> None:
        self._protected_blocks = protected_blocks
        self._probation = LruQueue()
        self._protected = LruQueue()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Node]:
        yield from self._probation
        yield from self._protected

    def __contains__(self, node: Node) -> bool:
        return node in self._probation or node in self._protected

    def push(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        self._probation.push([node for node in nodes if not node.reused])
        self._protected.push([node for node in nodes if node.reused])
        while len(self._protected) > self._protected_blocks:
            oldest = (self._protected.first(),)
            self._protected.remove(oldest)
            self._probation.push(oldest)

    def remove(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        self._protected.remove(self._probation.discard(nodes))

    def first(self) -> Node:
        """See EvictionOrder."""
        return (self._probation or self._protected).first()


def eviction_order(eviction: Eviction, total_blocks: int) -> EvictionOrder:
    """An empty order for a pool of `total_blocks` blocks."""
    if eviction == "lru":
        return LruQueue()
    return SegmentedQueue(int(PROTECTED_SHARE * total_blocks))
