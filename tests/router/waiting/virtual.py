"""An event loop in virtual time: nobody sleeps, the clock moves to the next timer at once."""

from __future__ import annotations

import asyncio
import selectors


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing; what it should have waited is added to the loop's time."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is not None and timeout > 0:
            self.passed_s += timeout
        return super().select(0 if timeout is not None else None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """For tests without sockets. Starts at 1,000 s."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return 1_000.0 + self._jumping.passed_s
