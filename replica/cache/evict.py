"""Which cached block goes first: the least recently used one, tails before heads.

Requests give their blocks back from tail to head, and whoever holds a block holds all blocks before
it. So a node always enters the queue behind every descendant that is in it, and the front is always
a node without resident children: the cache stays prefix-closed without any search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LruQueue(Generic[T]):
    """Idle nodes, least recently used first; every operation takes constant time."""

    def __init__(self) -> None:
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def push(self, item: T) -> None:
        """`item` was used last."""
        self._items[item] = None

    def remove(self, item: T) -> None:
        """`item` is in use again. Raises KeyError when it is not in the queue."""
        del self._items[item]

    def pop_oldest(self) -> T:
        """The one to evict. Raises StopIteration when empty."""
        item = next(iter(self._items))
        del self._items[item]
        return item
