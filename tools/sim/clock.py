"""Simulated time: what happens when, in one order that repeats to the bit."""

from __future__ import annotations

import heapq
from collections.abc import Callable

START_S = 1_000.0


class Agenda:
    """Call it for the time, as a clock. Entries of the same moment happen in the order in which
    they were made."""

    def __init__(self) -> None:
        self.now_s = START_S
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._made = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, at_s: float, act: Callable[[], None]) -> Callable[[], None]:
        """`act` at that time, or now if it is past; calling what comes back takes it off."""
        self._made += 1
        number = self._made
        heapq.heappush(self._entries, (max(at_s, self.now_s), number, act))
        return lambda: self._cancelled.add(number)

    def after(self, delay_s: float, act: Callable[[], None]) -> Callable[[], None]:
        """`act` after a while."""
        return self.at(self.now_s + delay_s, act)

    def step(self) -> bool:
        """Do what comes next; False when there is nothing."""
        while self._entries:
            at_s, number, act = heapq.heappop(self._entries)
            if number in self._cancelled:
                self._cancelled.discard(number)
                continue
            self.now_s = at_s
            act()
            return True
        return False
