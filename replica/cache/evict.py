"""In which order idle cached blocks would go. Every order here is prefix-closed without any search.

Requests give their blocks back from tail to head, and whoever holds a block holds all blocks before
it. So within one queue a node always enters behind every descendant that is in it. A node that was
used again has only ancestors that were used again, so it never outlasts one of them either.

For the same reason what enters together is one path, of which only a tail is ever evicted and only
a head ever used again: queues hold runs, not nodes, and thousands of blocks leave in one cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from configs.schema import Eviction
from events.errors import InvariantError
from replica.cache.node import Node, Place

PROTECTED_SHARE = 0.5
"""Of the pool: how many blocks that were used again outlast those that were not."""


class EvictionOrder(Protocol):
    """Idle nodes, next to be evicted first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Node]: ...

    def push(self, nodes: Sequence[Node]) -> None:
        """They were used last: a part of one path, tails before heads."""

    def reuse(self, nodes: Sequence[Node]) -> None:
        """They are in use again: a part of one path, heads first, and no ancestor of theirs is
        here. Takes time by the number of pushes that they came by. Raises InvariantError when one
        is not here."""

    def drop(self, node: Node) -> None:
        """It is evicted; no descendant of it is here. Raises InvariantError when it is not here."""

    def first(self) -> Node:
        """The one to evict. Raises StopIteration when empty."""


class Run:
    """A part of one path that entered `queue` at once, heads first: each node is the parent of the
    one behind it."""

    __slots__ = ("nodes", "queue")

    def __init__(self, queue: LruQueue, nodes: list[Node]) -> None:
        self.queue = queue
        self.nodes = nodes


class LruQueue:
    """The least recently used first. Each node knows its run, at its `place`. An OrderedDict: the
    first of a plain dict is searched for behind all that left before it."""

    def __init__(self, place: Place) -> None:
        self._place: Place = place
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._nodes = 0

    def __len__(self) -> int:
        return self._nodes

    def __iter__(self) -> Iterator[Node]:
        for run in self._runs:
            yield from reversed(run.nodes)

    def push(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        if not nodes:
            return
        run, place = Run(self, list(reversed(nodes))), self._place
        for node in nodes:
            setattr(node, place, run)
        self._runs[run] = None
        self._nodes += len(nodes)

    def reuse(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        reuse(nodes, self._place)

    def drop(self, node: Node) -> None:
        """See EvictionOrder."""
        drop(node, self._place)

    def first(self) -> Node:
        """See EvictionOrder."""
        return next(iter(self._runs)).nodes[-1]

    def shed(self, most: int) -> list[Node]:
        """Remove the next to be evicted, those of one run, at most so many; in that order."""
        run = next(iter(self._runs))
        shed = run.nodes[-most:]
        del run.nodes[-most:]
        self.left(run, len(shed))
        shed.reverse()
        return shed

    def left(self, run: Run, nodes: int) -> None:
        """So many nodes have left a run of this queue."""
        self._nodes -= nodes
        if not run.nodes:
            del self._runs[run]


def reuse(nodes: Sequence[Node], place: Place) -> None:
    """Take them from the heads of their runs, whichever queues those are in."""
    end = len(nodes)
    while end:
        node = nodes[end - 1]
        run: Run | None = getattr(node, place)
        count = node.depth - run.nodes[0].depth + 1 if run is not None and run.nodes else 0
        if run is None or not 0 < count <= end or run.nodes[count - 1 : count] != [node]:
            raise InvariantError("only an idle block, with all idle ones before it, is used again")
        del run.nodes[:count]
        run.queue.left(run, count)
        end -= count


def drop(node: Node, place: Place) -> None:
    """Take it from the tail of its run."""
    run: Run | None = getattr(node, place)
    if run is None or run.nodes[-1:] != [node]:
        raise InvariantError("only an idle block without any behind it is evicted")
    del run.nodes[-1]
    run.queue.left(run, 1)


def _was_reused(node: Node) -> bool:
    return node.reused


class SegmentedQueue:
    """Segmented LRU (Karedla, Love and Wherry 1994): prompts that nobody repeats, however many,
    push out only each other and what `protected_blocks` blocks that were used again leave of the
    pool. What is pushed out of the protected segment gets one more round in the other."""

    def __init__(self, protected_blocks: int, place: Place) -> None:
        self.protected_blocks = protected_blocks
        self._place: Place = place
        self._probation = LruQueue(place)
        self._protected = LruQueue(place)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Node]:
        yield from self._probation
        yield from self._protected

    def push(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        first = bisect_left(nodes, True, key=_was_reused)
        self._probation.push(nodes[:first])
        self._protected.push(nodes[first:])
        while (excess := len(self._protected) - self.protected_blocks) > 0:
            self._probation.push(self._protected.shed(excess))

    def reuse(self, nodes: Sequence[Node]) -> None:
        """See EvictionOrder."""
        reuse(nodes, self._place)

    def drop(self, node: Node) -> None:
        """See EvictionOrder."""
        drop(node, self._place)

    def first(self) -> Node:
        """See EvictionOrder."""
        return (self._probation or self._protected).first()


def eviction_order(eviction: Eviction, total_blocks: int, place: Place) -> EvictionOrder:
    """An empty order for a pool of `total_blocks` blocks; a node's run in it is at `place`."""
    if eviction == "lru":
        return LruQueue(place)
    return SegmentedQueue(int(PROTECTED_SHARE * total_blocks), place)
