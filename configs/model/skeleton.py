"""What a template writes around the texts of plain messages, worked out once per order of roles.

Nearly every template copies the contents as they are. Whether one does is tried out: it is rendered
with contents that may be copied and joined, and that break off the trial as soon as anything looks
into them. What could look in without being noticed is ruled out by the template's syntax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import nodes

from configs.model.segment import Segment

PLAIN_ROLES = frozenset(("system", "user", "assistant"))
MAX_MESSAGES = 128
MAX_CHARS = 1 << 18
_OPEN, _CLOSE = "\ue000", "\ue001"
_FORMAT = re.compile("(%%|%s)")
_HOLE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_LOSES_TRACK = (
    nodes.AssignBlock,
    nodes.CallBlock,
    nodes.Concat,
    nodes.FilterBlock,
    nodes.Include,
    nodes.Macro,
)
_SEES_WHAT_IT_LOOKS_AT = frozenset(("length", "trim"))
_LOOKS_AT_KINDS = frozenset(
    "boolean defined false iterable mapping none number sequence string true undefined".split()
)
_FUNCTIONS = frozenset(("namespace", "raise_exception", "range"))


class LookedIntoError(Exception):
    """The template did more with a text than copying it."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise LookedIntoError


class Opaque(str):
    """A text that can be joined to others and written out, and nothing else."""

    __slots__ = ()

    def __add__(self, other: str) -> Opaque:
        return Opaque(str.__add__(self, other))

    def __radd__(self, other: str) -> Opaque:
        return Opaque(str.__add__(other, self))

    def __str__(self) -> str:
        return str.__str__(self)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # what the library asks of everything
            return Opaque
        raise LookedIntoError

    __bool__ = __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __format__ = __getitem__ = __hash__ = __iter__ = __len__ = __repr__ = _refuse
    __mod__ = __rmod__ = __mul__ = __rmul__ = _refuse


def is_traceable(tree: nodes.Template, texts: Iterable[str]) -> bool:
    """Whether an Opaque notices whatever this template does with it. `texts` are what the template
    may write besides."""
    return (
        not any(_OPEN in text for text in texts)
        and next(tree.find_all(_LOSES_TRACK), None) is None
        and all(each.name in _SEES_WHAT_IT_LOOKS_AT for each in tree.find_all(nodes.Filter))
        and all(each.name in _LOOKS_AT_KINDS for each in tree.find_all(nodes.Test))
        and all(map(_plain_call, tree.find_all(nodes.Call)))
        and all(isinstance(each.right, nodes.Const) for each in tree.find_all(nodes.Mod))
        and all(map(_plain_search, tree.find_all(nodes.Compare)))
    )


def _plain_call(call: nodes.Call) -> bool:
    """A function that doesn't read texts, or a method given constants only: that of an Opaque is
    noticed, and to others it is not handed."""
    if isinstance(call.node, nodes.Name):
        return call.node.name in _FUNCTIONS
    given = [*call.args, *(keyword.value for keyword in call.kwargs)]
    simple = call.dyn_args is None and call.dyn_kwargs is None
    return simple and all(isinstance(each, nodes.Const) for each in given)


def _plain_search(compare: nodes.Compare) -> bool:
    """`in` asks what is on its right; what is on its left must be no Opaque."""
    searches = any(operand.op in ("in", "notin") for operand in compare.ops)
    return not searches or (isinstance(compare.expr, nodes.Const) and len(compare.ops) == 1)


def plain(messages: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[str]] | None:
    """Roles and texts, where the messages have nothing else; None where they have, or are many."""
    if len(messages) > MAX_MESSAGES:
        return None
    roles, contents = [], []
    for message in messages:
        if type(message) is not dict:
            return None
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or type(content) is not str or type(role) is not str:
            return None
        roles.append(role)
        contents.append(content)
    if not PLAIN_ROLES.issuperset(roles) or sum(map(len, contents)) > MAX_CHARS:
        return None
    return tuple(roles), contents


def holes(roles: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with numbered texts that can only be copied."""
    return [
        {"role": role, "content": Opaque(f"{_OPEN}{number}{_CLOSE}")}
        for number, role in enumerate(roles)
    ]


class Hole(NamedTuple):
    """A text between two markers: `around` is a format of the contents with these `numbers`."""

    around: str
    numbers: tuple[int, ...]

    def filled(self, contents: Sequence[str]) -> str:
        """The text."""
        return self.around % tuple([contents[number] for number in self.numbers])

    def parts(self) -> list[str | int]:
        """What it is made of: texts, and contents by number."""
        numbers = iter(self.numbers)
        found = (part for part in _FORMAT.split(self.around) if part)
        return [next(numbers) if part == "%s" else part.replace("%%", "%") for part in found]


class Skeleton:
    """What stands around the contents of messages with certain roles."""

    def __init__(self, text: str, segments: Callable[[str], list[Segment]]) -> None:
        """`text` is the rendering of `holes(...)`; `segments` cuts it at its markers."""
        self.copies = 0
        self.parts: list[Segment | Hole] = []
        for segment in segments(text):
            if segment.special_id is not None:
                self.parts.append(segment)
                continue
            parts = list(_parts(segment.text))
            numbers = tuple(part for part in parts if isinstance(part, int))
            texts = (part.replace("%", "%%") if isinstance(part, str) else "%s" for part in parts)
            self.copies += len(numbers)  # how often contents are written
            self.parts.append(Hole("".join(texts), numbers) if numbers else segment)

    def filled(self, contents: Sequence[str]) -> list[Segment]:
        """The conversation with these contents, none of which holds a marker or a part of one."""
        found = []
        for part in self.parts:
            if isinstance(part, Segment):
                found.append(part)
            elif text := part.filled(contents):
                found.append(Segment(text, None))
        return found


def _parts(text: str) -> Iterator[str | int]:
    for index, piece in enumerate(_HOLE.split(text)):
        if index % 2:
            yield int(piece)
        elif piece:
            yield piece
