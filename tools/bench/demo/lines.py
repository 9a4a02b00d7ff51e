"""What goes on, where no terminal shows a bar: few lines on standard error, however many steps."""

from __future__ import annotations

import sys

PARTS = 4


class Lines:
    """One line at the start, and one with each part of `total` that is done. Call it for each."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._say()

    def __call__(self) -> None:
        parts = PARTS * self._done // self._total
        self._done += 1
        if PARTS * self._done // self._total > parts:
            self._say()

    def _say(self) -> None:
        line = f"{self._label}: {self._done} of {self._total} requests"
        print(line, file=sys.stderr, flush=True)
