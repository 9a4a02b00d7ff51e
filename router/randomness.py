"""The system's random bytes, a page at a time: each request needs a few, and a system call for each
of them costs more than what is made of it."""

from __future__ import annotations

import os

PAGE_BYTES = 4_096


class RandomBytes:
    """Event loop only. No byte is given out twice."""

    def __init__(self) -> None:
        self._page = b""
        self._at = 0

    def __call__(self, count: int) -> bytes:
        """So many, at most a page."""
        start, end = self._at, self._at + count
        if end > len(self._page):
            self._page, start, end = os.urandom(PAGE_BYTES), 0, count
        self._at = end
        return self._page[start:end]


random_bytes = RandomBytes()
"""The process's own."""
