"""Liveness as progress of the engine: an open port proves nothing."""

from __future__ import annotations

from collections.abc import Callable

from replica.engine.messages import EngineLoad


class Progress:
    """Whether the engine steps while it has work. `stall_s` must exceed the longest step."""

    def __init__(self, stall_s: float, clock: Callable[[], float]) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._steps = -1
        self._moved_s = clock()

    def healthy(self, load: EngineLoad, has_work: bool) -> bool:
        """Look now. Call it at least every `stall_s`: the first look after an idle time starts
        the clock."""
        now_s = self._clock()
        if not has_work or load.steps != self._steps:
            self._steps = load.steps
            self._moved_s = now_s
        return load.alive and now_s - self._moved_s < self._stall_s
