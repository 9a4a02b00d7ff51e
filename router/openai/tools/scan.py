"""One call, read character by character: an object with a name and arguments.

It is written by a model, so it may break off anywhere or be no JSON at all. What is read is told as
early as it is certain, so that arguments can be streamed while they are generated.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_NAMES = frozenset(("name",))
_ARGUMENTS = frozenset(("arguments", "parameters"))
_KNOWN = _NAMES | _ARGUMENTS | {"type", "id", "function"}


class _Value:
    """Where one JSON value ends; a number or a word ends before the character behind it."""

    __slots__ = ("_depth", "_escaped", "_string", "bare", "text")

    def __init__(self, first: str) -> None:
        self.text: list[str] = []
        self.bare = first not in '{["'
        self._depth = 0
        self._string = self._escaped = False

    def push(self, character: str) -> bool:
        """Whether it ends with this one."""
        self.text.append(character)
        if self._string:
            closes = character == '"' and not self._escaped
            self._escaped = character == "\\" and not self._escaped
            self._string = not closes
            return closes and self._depth == 0
        if character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class _Phase(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()


class CallScanner:
    """`name` is set once it is known; `done` at the closing brace; `broken` where it can't be a
    call. `argued`: some of its arguments were read. `strict`: a key that no call has breaks it."""

    __slots__ = (
        "_fresh",
        "_key",
        "_phase",
        "_strict",
        "_value",
        "argued",
        "broken",
        "done",
        "name",
    )

    def __init__(self, strict: bool) -> None:
        self.name: str | None = None
        self.done = self.broken = self.argued = False
        self._strict = strict
        self._phase = _Phase.START
        self._key: str | None = None
        self._value: _Value | None = None
        self._fresh: list[str] = []

    def take(self) -> str:
        """What was read of the arguments since the last call of this."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        self.argued = self.argued or bool(fresh)
        return fresh

    def push(self, character: str) -> None:
        """Read one more."""
        value = self._value
        if value is not None and value.bare and (character in ",}" or _blank(character)):
            self._end_value()
        if self._value is not None:
            self._extend(self._value, character)
        elif not _blank(character):
            self._step(character)

    def _step(self, character: str) -> None:
        match self._phase, character:
            case _Phase.START, "{":
                self._phase = _Phase.KEY
            case _Phase.KEY, '"':
                self._begin(character)
            case _Phase.KEY, ",":
                pass
            case _Phase.KEY, "}":
                self.done, self.broken = True, self.name is None
            case _Phase.COLON, ":":
                self._phase = _Phase.VALUE
            case _Phase.VALUE, _:
                self._begin(character)
            case _:
                self.broken = True

    def _begin(self, character: str) -> None:
        self._value = _Value(character)
        self._extend(self._value, character)

    def _extend(self, value: _Value, character: str) -> None:
        ended = value.push(character)
        if self._in_arguments and value.text[0] == "{":
            self._fresh.append(character)
        if ended:
            self._end_value()

    @property
    def _in_arguments(self) -> bool:
        return self._phase is _Phase.VALUE and self._key in _ARGUMENTS

    def _end_value(self) -> None:
        assert self._value is not None
        text, self._value = "".join(self._value.text), None
        try:
            self._take_in(text)
        except ValueError:
            # Arguments that were streamed are the client's to judge.
            self.broken = not self._in_arguments
        self._phase = _Phase.COLON if self._phase is _Phase.KEY else _Phase.KEY

    def _take_in(self, text: str) -> None:
        """A key or value is whole. Raises ValueError where it is no JSON."""
        if self._phase is _Phase.KEY:
            self._key = json.loads(text)
            self.broken = self._strict and self._key not in _KNOWN
        elif self._key in _NAMES:
            name = json.loads(text)
            self.name = name if isinstance(name, str) else None
            self.broken = not self.name
        elif self._in_arguments and not text.startswith("{"):
            value = json.loads(text)
            self._fresh.append(value if isinstance(value, str) else text)


def _blank(character: str) -> bool:
    return character in " \t\r\n"
