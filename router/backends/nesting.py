"""Whether a JSON text that goes by has ended, found out without keeping any of it."""

from __future__ import annotations

import re
from collections import deque

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?)\Z)', re.DOTALL)
"""A whole one, or as much of it as there is: then with the backslash at the end as group 1."""


class Nesting:
    """Objects and lists that are open. A text that starts with one of them, and is cut anywhere
    before its last brace, has one that is."""

    def __init__(self) -> None:
        self._open = 0
        self._begun = False
        self._carried = b""
        """A quote, where the last part ended within a string, and what is escaped behind it."""

    def feed(self, data: bytes) -> None:
        """The next part, cut off anywhere."""
        data = self._carried + data
        last = deque(_STRING.finditer(data), 1)
        cut = last[0][1] if last and last[0].end() == len(data) else None
        self._carried = b"" if cut is None else b'"' + cut
        bare = _STRING.sub(b"", data)
        self._begun = self._begun or bare.lstrip()[:1] in (b"{", b"[")
        self._open += bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")

    @property
    def closed(self) -> bool:
        """Whether all that was opened was closed again."""
        return self._begun and not self._open and not self._carried
