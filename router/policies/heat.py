"""Which prefixes are hot: the share of recent requests that went beyond a shared prefix there.

A prefix that most requests share must not pull all of them to its first holder: it deserves as many
holders as its share of the traffic. Counted over the last requests, so that no clock is needed.
"""

from __future__ import annotations

from collections import Counter, deque

WINDOW_REQUESTS = 256
HOT_REQUESTS = 8


class PrefixHeat:
    """A sliding window over the last shared block of each request (b"" where none was shared)."""

    def __init__(self, window: int = WINDOW_REQUESTS) -> None:
        self._recent: deque[bytes] = deque(maxlen=window)
        self._counts: Counter[bytes] = Counter()

    def note(self, key: bytes) -> None:
        """One more request whose longest known prefix ends with this block."""
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(key)
        self._counts[key] += 1

    def holders_deserved(self, key: bytes, replicas: int) -> int:
        """How many of `replicas` should hold this prefix; 0 while it isn't hot."""
        count = self._counts[key] if key else 0
        if count < HOT_REQUESTS:
            return 0
        return round(replicas * count / len(self._recent))
