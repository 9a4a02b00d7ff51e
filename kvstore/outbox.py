"""What waits to be written to a tier: bounded, and what waited longest is dropped first.

A block that is not written costs somebody a recompute; a writer that makes others wait costs more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Filled from any thread, emptied by one. `dropped` counts what found no room. `on_lost` is
    told of every item that nobody will take: with a lock held, so it must not call back."""

    def __init__(self, max_items: int, on_lost: Callable[[T], None] | None = None) -> None:
        self.dropped = 0
        self._max_items = max_items
        self._on_lost = on_lost
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._closed = False
        self._taken = 0

    def __len__(self) -> int:
        return len(self._items) + self._taken

    def put(self, items: Iterable[T]) -> None:
        """Never waits."""
        with self._changed:
            self._items.extend(items)
            if self._closed:
                self._lose_all()
                return
            while len(self._items) > self._max_items:
                self._lose(self._items.popleft())
                self.dropped += 1
            self._changed.notify_all()

    def take(self, most: int) -> list[T]:
        """The next items, as soon as there are any; none once closed. Ends the last `take`."""
        with self._changed:
            self._taken = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._items or self._closed)
            if self._closed:
                return []
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._taken = len(taken)
            return taken

    def drain(self, timeout_s: float) -> bool:
        """Whether all was taken, and what was taken dealt with, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self), timeout_s)

    def clear(self) -> None:
        """Forget what waits."""
        with self._changed:
            self._lose_all()
            self._changed.notify_all()

    def forget(self, unwanted: Callable[[T], bool]) -> None:
        """Forget those of the items that wait."""
        with self._changed:
            waiting, self._items = self._items, deque()
            for item in waiting:
                if unwanted(item):
                    self._lose(item)
                else:
                    self._items.append(item)
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what waits; idempotent."""
        with self._changed:
            self._closed = True
            self._lose_all()
            self._changed.notify_all()

    def _lose_all(self) -> None:
        while self._items:
            self._lose(self._items.popleft())

    def _lose(self, item: T) -> None:
        if self._on_lost is not None:
            self._on_lost(item)
