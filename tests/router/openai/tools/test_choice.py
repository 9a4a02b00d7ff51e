"""Grammars for calls: compiled as a replica does, and asked what they let through."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from configs.model.card import ModelCard
from events.errors import UserError
from events.grammar import JSON_SCHEMA, MAX_GRAMMAR_BYTES, REGEX, Grammar
from replica.grammar.compiler import GrammarCompiler
from router.openai.tools.choice import ToolChoice, calls_grammar
from router.openai.tools.formats import HERMES, LLAMA, MISTRAL, SMOLLM, ToolFormat
from router.openai.tools.parser import CallBegun, ToolParser

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}, "s": {"type": "string"}},
    "required": ["x"],
    "$defs": {"number": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "add"}},
]
FORMATS = pytest.mark.parametrize(
    "format_", [HERMES, SMOLLM, LLAMA, MISTRAL], ids=lambda format_: format_.name
)
FORCED, AUTO = ToolChoice("required"), ToolChoice("auto")


class Judge:
    """Whether a whole answer is allowed."""

    def __init__(self, card: ModelCard) -> None:
        self._tokenizer = card.tokenizer
        self._eos = min(card.eos_ids)
        self._compiler = GrammarCompiler(card.tokenizer, card.eos_ids)

    def __call__(self, grammar: Grammar, text: str) -> bool:
        (state,) = self._compiler.states(grammar, [()])
        if not state.advance(self._tokenizer.encode(text)):
            return False
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32)
        state.fill(words)
        return bool(words[self._eos // 32] >> self._eos % 32 & 1)


@pytest.fixture(scope="module")
def allows(card: ModelCard) -> Judge:
    return Judge(card)


def written(format_: ToolFormat, *calls: tuple[str, Any]) -> str:
    bodies = [
        f'{{"name": "{name}", "{format_.key}": {json.dumps(arguments)}}}'
        for name, arguments in calls
    ]
    joined = format_.between.join(f"{format_.opening}{body}{format_.closing}" for body in bodies)
    return f"{format_.head}{joined}{format_.tail}"


ADD, LOOK = ("add", {}), ("look", {"x": 1, "s": "a"})


@FORMATS
def test_required_leaves_nothing_but_calls(allows: Judge, format_: ToolFormat) -> None:
    grammar = calls_grammar(format_, TOOLS, FORCED, True, None)
    for calls in ([ADD], [LOOK], [ADD, LOOK, ADD]):
        text = written(format_, *calls)
        assert allows(grammar, text)
        parts = ToolParser(format_, frozenset(("add", "look"))).push(text)
        assert sum(isinstance(part, CallBegun) for part in parts) == len(calls)
    for text in ("hello", written(format_, ("other", {})), written(format_, ("look", {"x": "1"})),
                 written(format_, ("look", {"x": 1, "y": 2})), f"so: {written(format_, ADD)}",
                 written(format_, ("add", {"x": 1}))):  # fmt: skip
        assert not allows(grammar, text)


@FORMATS
def test_one_call_where_no_more_is_allowed(allows: Judge, format_: ToolFormat) -> None:
    for choice in (FORCED, AUTO):
        grammar = calls_grammar(format_, TOOLS, choice, False, None)
        assert allows(grammar, written(format_, LOOK))
        assert not allows(grammar, written(format_, LOOK, ADD))


@FORMATS
def test_a_named_tool_is_the_only_one(allows: Judge, format_: ToolFormat) -> None:
    grammar = calls_grammar(format_, TOOLS, ToolChoice("required", "add"), True, None)
    assert allows(grammar, written(format_, ADD))
    assert not allows(grammar, written(format_, LOOK))
    assert not allows(grammar, written(format_, ADD, ADD))


@FORMATS
def test_auto_leaves_text_free_and_calls_not(allows: Judge, format_: ToolFormat) -> None:
    grammar = calls_grammar(format_, TOOLS, AUTO, True, None)
    assert allows(grammar, "Hello < you > & {all}.\n")
    assert allows(grammar, written(format_, LOOK, ADD))
    assert not allows(grammar, written(format_, ("look", {"x": "1"})))
    if format_.marker:
        assert allows(grammar, f"Let me see.\n{written(format_, LOOK)}")
        assert not allows(grammar, f"Let me see.\n{written(format_, ('other', {}))}")


def test_a_schema_for_answers_without_a_call(allows: Judge) -> None:
    answer = Grammar(JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}}))
    grammar = calls_grammar(HERMES, TOOLS, AUTO, True, answer)
    assert allows(grammar, "[1, 2]")
    assert allows(grammar, written(HERMES, ADD))
    assert not allows(grammar, "hello")
    forced = calls_grammar(HERMES, TOOLS, FORCED, True, answer)
    assert not allows(forced, "[1, 2]")
    with pytest.raises(UserError):
        calls_grammar(HERMES, TOOLS, AUTO, True, Grammar(REGEX, "a"))


def test_names_and_schemas_can_say_what_they_like(allows: Judge) -> None:
    """Nothing in them can end a rule or begin another."""
    name = 'a"}\n\\start: "x"'
    parameters = {"type": "object", "properties": {'k"\n%json': {"const": "</tool_call>\n\""}},
                  "required": ['k"\n%json'], "description": "\nstart: /.*/"}  # fmt: skip
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    grammar = calls_grammar(HERMES, [tool], FORCED, False, None)
    arguments = json.dumps({'k"\n%json': '</tool_call>\n"'})
    body = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    assert allows(grammar, f"<tool_call>\n{body}\n</tool_call>")
    assert not allows(grammar, "x")


def test_schemas_are_measured_before_they_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.tools.choice.can_end", lambda schema: pytest.fail("looked"))
    large = {"enum": ["x" * MAX_GRAMMAR_BYTES]}
    tool = {"type": "function", "function": {"name": "look", "parameters": large}}
    with pytest.raises(UserError) as refused:
        calls_grammar(HERMES, [tool], FORCED, False, None)
    assert (refused.value.error.status, refused.value.error.param) == (400, "tools")
