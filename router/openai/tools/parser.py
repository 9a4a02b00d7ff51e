"""An answer's text, as it grows, taken apart into what is said and what is called.

Fed with text cut anywhere it gives the same parts in the same order. What could still become a call
is held back until it is decided; what was no call after all is given out as text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from router.openai.tools.formats import ToolFormat
from router.openai.tools.scan import CallScanner

_SEPARATORS = ",; \t\r\n[]"


class Said(NamedTuple):
    """Text for the reader."""

    text: str


class CallBegun(NamedTuple):
    """A call of the function `name`; `index` counts the calls of one answer."""

    index: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: joined they are what the model wrote."""

    index: int
    text: str


Part = Said | CallBegun | CallArguments


class _Where(Enum):
    START = auto()  # of an answer whose calls stand bare, if there are any
    TEXT = auto()
    BETWEEN = auto()  # calls, or a marker and a call
    CALL = auto()
    PLAIN = auto()  # no call can come any more


class ToolParser:
    """Of one choice. `names`: the tools that were offered; bare calls of anything else are text."""

    def __init__(self, format_: ToolFormat, names: frozenset[str]) -> None:
        self.calls = 0
        self._marker, self._end_marker = format_.marker, format_.end_marker
        self._names = names
        self._where = _Where.TEXT if self._marker else _Where.START
        self._tail = ""  # read, and given out as text unless it turns out to belong to a call
        self._gap = ""  # read since the marker or the last call
        self._scanner = CallScanner(strict=True)
        self._begun = False  # the call that is being read
        self._grouped = False  # a call came since the marker

    @property
    def cut(self) -> bool:
        """Whether what came so far ends in the middle of a call."""
        return self._begun

    def push(self, text: str) -> list[Part]:
        """The parts that this text decides."""
        if self._where is _Where.PLAIN:
            return [Said(text)] if text else []
        parts: list[Part] = []
        for character in text:
            parts += self._step(character)
        if self._where is _Where.TEXT:
            parts += self._release()
        return _joined(parts)

    def end(self) -> list[Part]:
        """The answer is over: the rest."""
        rest, self._tail = self._tail, ""
        if not rest or self._grouped or (self.calls and rest.isspace()):
            return []
        return [Said(rest)]

    def _step(self, character: str) -> Iterator[Part]:
        if self._where is _Where.PLAIN:
            yield Said(character)
            return
        if not self._begun:
            self._tail += character
        match self._where:
            case _Where.START:
                yield from self._start(character)
            case _Where.TEXT:
                yield from self._text()
            case _Where.BETWEEN:
                yield from self._between(character)
            case _Where.CALL:
                yield from self._call(character)

    def _start(self, character: str) -> Iterator[Part]:
        if character in "{[":
            self._where = _Where.BETWEEN
            yield from self._between(character)
        elif not character.isspace():
            yield from self._give_up()

    def _text(self) -> Iterator[Part]:
        if self._tail.endswith(self._marker):
            before = self._tail[: -len(self._marker)].rstrip()
            self._tail = self._tail[len(before) :]
            self._where, self._gap, self._grouped = _Where.BETWEEN, "", False
            if before:
                yield Said(before)

    def _release(self) -> list[Part]:
        """Text that no marker can reach any more. Blanks before a marker are not said."""
        tail, marker = self._tail, self._marker
        sizes = range(min(len(marker) - 1, len(tail)), 0, -1)
        held = next((size for size in sizes if tail.endswith(marker[:size])), 0)
        safe = len(tail[: len(tail) - held].rstrip())
        self._tail = tail[safe:]
        return [Said(tail[:safe])] if safe else []

    def _between(self, character: str) -> Iterator[Part]:
        self._gap += character
        read = self._gap.strip(_SEPARATORS)
        if read == "{":
            self._scanner = CallScanner(strict=not self._marker)
            self._where = _Where.CALL
            self._scanner.push(character)
        elif read and read == self._end_marker:
            yield from self._close()
        elif not self._end_marker.startswith(read):
            yield from self._give_up()

    def _close(self) -> Iterator[Part]:
        """At the end marker. Without a call before it, all of it was text."""
        self._where = _Where.TEXT
        if not self._grouped:
            yield Said(self._tail)
        self._tail, self._grouped = "", False

    def _call(self, character: str) -> Iterator[Part]:
        scanner = self._scanner
        scanner.push(character)
        if scanner.name is not None and not self._begun:
            if self._marker or scanner.name in self._names:
                yield self._begin(scanner.name)
            else:
                scanner.broken = True
        if self._begun and (fresh := scanner.take()):
            yield CallArguments(self.calls - 1, fresh)
        if scanner.broken:
            self._begun = False
            yield from self._give_up()
        elif scanner.done:
            if not scanner.argued:
                yield CallArguments(self.calls - 1, "{}")
            self._where, self._gap = _Where.BETWEEN, ""
            self._begun, self._grouped = False, True

    def _begin(self, name: str) -> CallBegun:
        self._tail, self._begun = "", True
        self.calls += 1
        return CallBegun(self.calls - 1, f"call_{secrets.token_hex(12)}", name)

    def _give_up(self) -> Iterator[Part]:
        """It is no call, or not any more."""
        self._where = _Where.TEXT if self._marker else _Where.PLAIN
        self._grouped = False
        if self._tail:
            yield Said(self._tail)
        self._tail = ""


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind in one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Said) and isinstance(last, Said):
            found[-1] = Said(last.text + part.text)
        elif (
            isinstance(part, CallArguments)
            and isinstance(last, CallArguments)
            and part.index == last.index
        ):
            found[-1] = CallArguments(part.index, last.text + part.text)
        else:
            found.append(part)
    return found
