"""Rendering a conversation with the model's own chat template.

User text never becomes a marker: wherever a user's string spells a special token, or could complete
one together with what the template writes around it, the spelling is broken by a sentinel, a
private character that occurs nowhere in the input. After rendering the text is cut at the unbroken
markers, and the sentinels are taken out. The template itself is the operator's choice: it runs
sandboxed and its output is bounded, its running time is not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import chain, pairwise
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.model.conversation import check, normalise
from configs.model.errors import ModelError, TemplateError
from configs.model.segment import Segment as Segment

MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_MESSAGE_CHARS = 200
_PRIVATE_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class _RaisedByTemplateError(Exception):
    """The template called raise_exception."""


def _raise_exception(message: object) -> None:
    raise _RaisedByTemplateError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as chat templates expect it; Jinja's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _strings(value: Any) -> chain[str]:
    """Every string inside, keys too."""
    if isinstance(value, str):
        return chain((value,))
    if isinstance(value, dict):
        return chain.from_iterable(map(_strings, chain(value.keys(), value.values())))
    return chain.from_iterable(map(_strings, value if isinstance(value, list) else ()))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return value


def _unused_character(strings: chain[str]) -> str:
    used: set[str] = set()
    used.update(*(text for text in strings if not text.isascii()))
    for code in chain.from_iterable(_PRIVATE_RANGES):
        if chr(code) not in used:
            return chr(code)
    raise TemplateError("the text uses every private character of Unicode")


class _Breaker:
    """Finds markers, and breaks what a user's string could add to one."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._spellings = sorted(markers, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._heads = {text[:size] for text in markers for size in range(1, len(text))}
        self._tails = {text[-size:] for text in markers for size in range(1, len(text))}
        self._longest = max(map(len, self._spellings), default=0)
        # Overlapping markers are all found, since only the first character is consumed.
        self._inside = re.compile(f"(?=({self.pattern.pattern}))")

    def broken(self, text: str, sentinel: str) -> str:
        """`text` with the sentinel at every place where a marker begins, runs in or runs out."""
        cuts = set()
        if any(spelling in text for spelling in self._spellings):  # far cheaper than the pattern
            cuts = {found.start() + 1 for found in self._inside.finditer(text)}
        sizes = range(1, min(self._longest, len(text) + 1))
        cuts |= {len(text) - size + 1 for size in sizes if text[-size:] in self._heads}
        cuts |= {size - 1 for size in sizes if text[:size] in self._tails}
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return sentinel.join(text[a:b] for a, b in pairwise(edges))


class ChatTemplate:
    """One compiled chat template. Safe to share between threads."""

    def __init__(
        self,
        source: str,
        markers: Mapping[str, int],
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`markers` maps the spelling of each special token to its id; `variables` (bos_token, ...)
        are handed to the template. Raises ModelError when the template can't be compiled.
        """
        if any(len(text) < 2 for text in markers):
            raise ModelError("a special token of one character can't be told from text")
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.supports_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template can't be compiled: {error}") from error
        self._markers = dict(markers)
        self._variables = dict(variables or {})
        self._reserved = (source, *self._variables.values(), *self._markers)
        self._breaker = _Breaker(markers)
        parts = ["wr-template-1", source, sorted(self._variables.items()), sorted(markers.items())]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The conversation as markers and plain text.

        Role "developer" is "system", content given as text parts is their concatenation. Raises
        TemplateError for what the template refuses, for tools where it has no place for them, and
        for a conversation that is malformed.
        """
        if tools and not self.supports_tools:
            raise TemplateError("this model's chat template has no place for tools")
        check(tools)
        given = {"messages": normalise(messages), "tools": tools or None}
        sentinel = _unused_character(chain(_strings(given), self._reserved))
        safe = _mapped(given, lambda text: self._breaker.broken(text, sentinel))
        text = self._rendered(safe | {"add_generation_prompt": add_generation_prompt}, sentinel)
        return self._segments(text, sentinel)

    def _rendered(self, values: dict[str, Any], sentinel: str) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(self._variables | values):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateError(f"more than {MAX_RENDERED_CHARS} characters of text")
                pieces.append(piece)
        except _RaisedByTemplateError as error:
            message = str(error).replace(sentinel, "")[:MAX_MESSAGE_CHARS]
            raise TemplateError(message) from None
        except TemplateError:
            raise
        except Exception as error:  # whatever the model's template does wrong
            kind = type(error).__name__
            raise TemplateError(f"the chat template can't render this ({kind})") from None
        return "".join(pieces)

    def _segments(self, text: str, sentinel: str) -> list[Segment]:
        segments, at = [], 0
        for found in self._breaker.pattern.finditer(text):
            segments.append(Segment(text[at : found.start()].replace(sentinel, ""), None))
            segments.append(Segment(found.group(), self._markers[found.group()]))
            at = found.end()
        segments.append(Segment(text[at:].replace(sentinel, ""), None))
        return [segment for segment in segments if segment.text]
