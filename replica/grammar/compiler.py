"""From a grammar's text to the states of its children: checked, cached, bounded.

Blocking, and safe to call from several threads: the library lets go of the interpreter's lock while
it compiles. Its limits bound the time that one grammar takes (about a second) and the memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from events.errors import UserError
from events.finite import can_end
from events.grammar import JSON_SCHEMA, LARK, REGEX, Grammar
from replica.grammar import faults, taster
from replica.grammar.state import GrammarState
from replica.grammar.tokens import Spelling, grammar_tokenizer

CACHED_GRAMMARS = 64
CACHED_BYTES = 4 * 1024 * 1024
"""Of source; what is compiled takes a multiple of it."""

MAX_DEPTH = 64

JSON_OPTIONS: Any = {
    # One break and a bounded indent, or one space: as models write JSON, and no way to go on for
    # ever without saying anything.
    "whitespace_flexible": True,
    "whitespace_pattern": r"\n {0,32}| ",
    "lenient": False,
}


class GrammarCompiler:
    """One per replica. A cache entry belongs to one scope: nobody learns what others asked for."""

    def __init__(self, vocabulary: Spelling, eos_ids: Collection[int]) -> None:
        self._vocab_size = vocabulary.vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer = grammar_tokenizer(vocabulary, eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = Lock()
        self._cache: OrderedDict[tuple[bytes, str, str], LLMatcher] = OrderedDict()
        self._cached_bytes = 0

    def states(
        self, grammar: Grammar, outputs: Sequence[Sequence[int]], scope: bytes = b""
    ) -> list[GrammarState]:
        """One state behind each of `outputs`. Raises UserError (400)."""
        compiled = self._compiled(grammar, scope)
        found = []
        for output in outputs:
            state = GrammarState(compiled.deep_copy())
            if not state.advance(output) or state.finished:
                raise faults.beyond(grammar)
            found.append(state)
        return found

    def known(self, grammar: Grammar, count: int, scope: bytes = b"") -> list[GrammarState] | None:
        """So many states at its start, at once; None for one that is yet to be compiled."""
        matcher = self._cached((scope, grammar.kind, grammar.source))
        if matcher is None:
            return None
        return [GrammarState(matcher.deep_copy()) for _ in range(count)]

    def _compiled(self, grammar: Grammar, scope: bytes) -> LLMatcher:
        key = (scope, grammar.kind, grammar.source)
        matcher = self._cached(key)
        if matcher is None:
            matcher = self._compile(grammar)
            with self._lock:
                self._keep(key, matcher)
        return matcher

    def _cached(self, key: tuple[bytes, str, str]) -> LLMatcher | None:
        with self._lock:
            matcher = self._cache.get(key)
            if matcher is not None:
                self._cache.move_to_end(key)
            return matcher

    def _keep(self, key: tuple[bytes, str, str], matcher: LLMatcher) -> None:
        if key not in self._cache:
            self._cached_bytes += len(key[2])
        self._cache[key] = matcher
        while len(self._cache) > CACHED_GRAMMARS or self._cached_bytes > CACHED_BYTES:
            (_, _, source), _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(source)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not taster.is_harmless(grammar) and not taster.survives(grammar):
            raise faults.too_costly(grammar)
        matcher = LLMatcher(self._tokenizer, _text(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise faults.from_library(grammar, matcher.get_error())
        if not self._says_anything(GrammarState(matcher.deep_copy())):
            raise faults.empty(grammar)
        return matcher

    def _says_anything(self, state: GrammarState) -> bool:
        """Whether there is a first token that is not the end."""
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        state.fill(words)
        for token in self._eos_ids:
            words.view(np.uint8)[token // 8] &= 0xFF ^ (1 << token % 8)
        return bool(words.any())


def try_out(grammar: Grammar) -> None:
    """Do what compiling does, over single bytes. What is refused is no failure."""
    with suppress(UserError):
        matcher = LLMatcher(LLTokenizer("byte"), _text(grammar), log_level=0)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()


def _text(grammar: Grammar) -> str:
    """The grammar in the library's own terms. Raises UserError."""
    made: str
    if grammar.kind == JSON_SCHEMA:
        try:
            made = LLMatcher.grammar_from_json_schema(_schema(grammar), overrides=JSON_OPTIONS)
        except ValueError as error:  # its reader knows fewer numbers than ours
            raise faults.from_library(grammar, str(error)) from None
    elif grammar.kind == REGEX:
        made = LLMatcher.grammar_from_regex(grammar.source)
    elif grammar.kind == LARK:
        made = LLMatcher.grammar_from_lark(_lark(grammar))
    else:
        raise faults.unknown_kind(grammar)
    return made


def _lark(grammar: Grammar) -> str:
    """Its own dialect, or GBNF as llama.cpp and vLLM's users write it. Raises UserError."""
    if is_lark_syntax(grammar.source):
        return grammar.source
    try:
        return gbnf_to_lark(grammar.source)
    except Exception:  # of any kind: the converter trusts its input
        raise faults.from_library(grammar, "") from None


def _schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.source)
    except ValueError:
        raise faults.not_json(grammar) from None
    except RecursionError:
        raise faults.too_deep(grammar, MAX_DEPTH) from None
    if not isinstance(schema, (dict, bool)):
        raise faults.not_json(grammar)
    if not _shallow(schema):
        raise faults.too_deep(grammar, MAX_DEPTH)
    if not can_end(schema):
        raise faults.endless(grammar)
    return grammar.source


def _shallow(value: Any, room: int = MAX_DEPTH) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return room > 0 and all(_shallow(each, room - 1) for each in inside)
