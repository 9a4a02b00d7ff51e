"""Stop strings in a growing text: where the earliest one completes, and what must be held back.

Each string is followed by its own automaton (Knuth, Morris, Pratt), one character at a time, so
that the answer can't depend on how the text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """`stop` completed after `end` characters of the pushed text."""

    stop: str
    end: int


def _borders(pattern: str) -> list[int]:
    """borders[i]: length of the longest proper prefix of pattern[:i] that is also its suffix."""
    borders = [0, 0]
    length = 0
    for character in pattern[1:]:
        while length and pattern[length] != character:
            length = borders[length]
        length += pattern[length] == character
        borders.append(length)
    return borders


class _Pattern:
    """One stop string and how much of it the text's end matches."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def push(self, character: str) -> bool:
        """Whether this character completes the string; then what is left is its longest border."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched]
        self.matched += self.text[self.matched] == character
        completed = self.matched == len(self.text)
        if completed:
            self.matched = self._borders[self.matched]
        return completed


class StopFinder:
    """Follows all stop strings of one child. The strings must not be empty."""

    __slots__ = ("_patterns",)

    def __init__(self, stops: Sequence[str]) -> None:
        # Of strings that complete at the same character the longest wins: it starts earliest.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]

    def push(self, text: str, armed: bool = True) -> StopHit | None:
        """The earliest completion in `text`, if any. Unarmed, text is followed but never stops."""
        if not self._patterns:
            return None
        for index, character in enumerate(text):
            completed = [p.text for p in self._patterns if p.push(character)]
            if completed and armed:
                return StopHit(completed[0], index + 1)
        return None

    @property
    def held(self) -> int:
        """Characters at the text's end that could begin a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)
