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
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.model.conversation import check, normalise
from configs.model.errors import ModelError, TemplateError
from configs.model.segment import Segment as Segment
from configs.model.skeleton import Skeleton, holes, is_traceable, plain

MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_MESSAGE_CHARS = 200
_SHORT_CHARS, _SHORT_KEPT = 32, 1_024
_SKELETONS_KEPT, _MAX_COPIES = 256, 4
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


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair is in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _unused_character(strings: Iterable[str]) -> str:
    wide = [text for text in strings if not text.isascii()]
    first = chr(_PRIVATE_RANGES[0][0])
    if not any(first in text for text in wide):
        return first
    used: set[str] = set()
    used.update(*wide)
    for code in chain.from_iterable(_PRIVATE_RANGES):
        if chr(code) not in used:
            return chr(code)
    raise TemplateError("the text uses every private character of Unicode")


def _longest_of(spellings: Iterable[str]) -> str:
    """A pattern of the longest of them that stands at a place. It looks at each letter once: one
    after the other, hundreds of them that begin alike would take a second of a long text that is
    written for it."""
    rests: dict[str, list[str]] = {}
    ends = False
    for spelling in spellings:
        ends |= not spelling
        if spelling:
            rests.setdefault(spelling[0], []).append(spelling[1:])
    ways = [re.escape(letter) + _longest_of(each) for letter, each in rests.items()]
    if len(ways) == 1 and not ends:
        return ways[0]
    return f"(?:{'|'.join(ways)})" + "?" * ends if ways else ""


class _Breaker:
    """Finds markers, and breaks what a user's string could add to one."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._spellings = sorted(markers, key=lambda text: (-len(text), text))
        self.pattern = re.compile(_longest_of(self._spellings) or r"(?!)")
        self._heads = {text[:size] for text in markers for size in range(1, len(text))}
        self._tails = {text[-size:] for text in markers for size in range(1, len(text))}
        self._longest = max(map(len, self._spellings), default=0)
        self._first = frozenset(text[0] for text in markers)
        self._only_first = "".join(self._first) if len(self._first) == 1 else ""
        self._last = frozenset(text[-1] for text in markers)
        # Overlapping markers are all found, since only the first character is consumed.
        self._inside = re.compile(f"(?=({self.pattern.pattern}))")
        # Names of fields and roles come with every message.
        self._short_cuts = lru_cache(_SHORT_KEPT)(self._cuts)

    def broken(self, text: str, sentinel: str) -> str:
        """`text` with the sentinel at every place where a marker begins, runs in or runs out."""
        cuts = self.cuts(text)
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return sentinel.join(text[a:b] for a, b in pairwise(edges))

    def cuts(self, text: str) -> set[int]:
        """Those places; none in nearly every text."""
        return self._short_cuts(text) if len(text) <= _SHORT_CHARS else self._cuts(text)

    def _cuts(self, text: str) -> set[int]:
        cuts = set()
        if self._any_inside(text):
            cuts = {found.start() + 1 for found in self._inside.finditer(text)}
        sizes = range(1, min(self._longest, len(text) + 1))
        if not self._first.isdisjoint(text[1 - self._longest :]):
            cuts |= {len(text) - size + 1 for size in sizes if text[-size:] in self._heads}
        if not self._last.isdisjoint(text[: self._longest - 1]):
            cuts |= {size - 1 for size in sizes if text[:size] in self._tails}
        return cuts

    def _any_inside(self, text: str) -> bool:
        """The pattern is quick where all spellings begin alike, and slow where they don't."""
        if self._only_first:
            return self._only_first in text and self.pattern.search(text) is not None
        return any(spelling in text for spelling in self._spellings)


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
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template can't be compiled: {error}") from error
        self.source = source
        self.supports_tools = "tools" in find_undeclared_variables(tree)
        self._markers = dict(markers)
        self.variables = dict(variables or {})
        self._reserved = (source, *self.variables.values(), *self._markers)
        self._breaker = _Breaker(markers)
        self._traceable = is_traceable(tree, self._reserved)
        self._skeleton = lru_cache(_SKELETONS_KEPT)(self._make_skeleton)
        parts = ["wr-template-1", source, sorted(self.variables.items()), sorted(markers.items())]
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
        if not tools and (found := self.outlined(messages, add_generation_prompt)) is not None:
            skeleton, contents = found
            return skeleton.filled(contents)
        check(tools)
        return self._render_fully(messages, tools, add_generation_prompt)

    def outlined(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> tuple[Skeleton, list[str]] | None:
        """The same for plain messages without a marker, without running the template: what stands
        around their contents, and these. Quick, and bounded. None for others."""
        if not self._traceable or not isinstance(messages, list) or not messages:
            return None
        known = plain(messages)
        if known is None:
            return None
        roles, contents = known
        if any(map(self._breaker.cuts, contents)) or not all(map(_is_unicode, contents)):
            return None
        skeleton = self._skeleton(roles, add_generation_prompt)
        return None if skeleton is None else (skeleton, contents)

    @property
    def markers(self) -> list[str]:
        """The spellings of all markers."""
        return list(self._markers)

    def skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """What stands around the contents of messages with these plain roles, and of the next
        answer, as long as no marker is among them. None where it depends on them."""
        return self._skeleton(roles, True) if self._traceable else None

    def _make_skeleton(
        self, roles: tuple[str, ...], add_generation_prompt: bool
    ) -> Skeleton | None:
        """None where the template looks into the texts, or refuses these roles."""
        values = {"messages": holes(roles), "add_generation_prompt": add_generation_prompt}
        try:
            text = self._rendered(values | {"tools": None}, "")
        except TemplateError:
            return None
        skeleton = Skeleton(text, lambda text: self._segments(text, ""))
        if skeleton.copies > _MAX_COPIES * len(roles):
            return None  # how much is written has to be watched
        for content in ("", "a word", " \n"):
            messages = [{"role": role, "content": content} for role in roles]
            whole = self._render_fully(messages, None, add_generation_prompt)
            if skeleton.filled([content] * len(roles)) != whole:
                return None
        return skeleton

    def _render_fully(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> list[Segment]:
        given = {"messages": normalise(messages), "tools": tools or None}
        values = given | {"add_generation_prompt": add_generation_prompt}
        strings = list(_strings(given))
        if not any(map(self._breaker.cuts, strings)):
            return self._segments(self._rendered(values, ""), "")
        sentinel = _unused_character([*strings, *self._reserved])
        safe = _mapped(values, lambda text: self._breaker.broken(text, sentinel))
        return self._segments(self._rendered(safe, sentinel), sentinel)

    def _rendered(self, values: dict[str, Any], sentinel: str) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(self.variables | values):
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
        """`sentinel` is empty where none was needed."""
        segments, at = [], 0
        for found in self._breaker.pattern.finditer(text):
            start, end = found.span()
            segments.append(Segment(text[at:start], None))
            segments.append(Segment(text[start:end], self._markers[text[start:end]]))
            at = end
        segments.append(Segment(text[at:], None))
        if sentinel:
            segments = [Segment(text.replace(sentinel, ""), token) for text, token in segments]
        return [segment for segment in segments if segment.text]
