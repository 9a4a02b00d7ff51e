"""Which calls an answer may hold, and the grammar that sees to it.

"auto" leaves the model free, unless a tool is strict or at most one call is allowed: then text is
free, and calls are not. "required" and a named tool leave nothing but calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from events.finite import can_end
from events.grammar import JSON_SCHEMA, LARK, MAX_GRAMMAR_BYTES, Grammar
from router.openai import faults
from router.openai.fields import Field, mapping, nested, one_of, string
from router.openai.structured import grammar, literal
from router.openai.tools.formats import ToolFormat

_MAX_NAME_CHARS = 64
_EXACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write past calls: what was generated is found in the cache by the next turn."""

_EMPTY = {"type": "object", "properties": {}}
MODES = ("none", "auto", "required")


class ToolChoice(Struct, frozen=True):
    """`mode` is one of MODES; `name` is the one tool that has to be called."""

    mode: str
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether there must be a call."""
        return self.mode == "required"


class Calls(Struct, frozen=True):
    """What the reader of an answer has to look for."""

    format: ToolFormat
    names: frozenset[str]


_function = nested({"name": Field("name", string(_MAX_NAME_CHARS, 1), True)})
_named = nested(
    {
        "type": Field(None, one_of("function"), True),
        "function": Field("function", _function, True),
    }
)


def tool_choice(path: str, value: Any) -> ToolChoice:
    """A reader of `tool_choice`."""
    if isinstance(value, str):
        return ToolChoice(one_of(*MODES)(path, value))
    if not isinstance(value, dict):
        raise faults.invalid_type(path, "one of a string or object", value)
    return ToolChoice("required", _named(path, mapping(path, value))["function"]["name"])


def calls_grammar(
    format_: ToolFormat,
    tools: Sequence[dict[str, Any]],
    choice: ToolChoice,
    parallel: bool,
    answer: Grammar | None,
) -> Grammar:
    """What an answer with these tools may be. `answer`: a schema for answers without calls, which
    a forced call leaves no room for. Raises UserError.
    """
    offered = [tool["function"] for tool in tools]
    if choice.name is not None:
        offered = [function for function in offered if function["name"] == choice.name][:1]
        if not offered:
            raise faults.invalid_value("tool_choice", "it names none of the tools")
        parallel = False
    _check_size(offered)
    rules = [f"call_{at}: {_call(format_, each)}" for at, each in enumerate(offered)]
    rules.append(f"call: {' | '.join(f'call_{at}' for at in range(len(offered)))}")
    more = f" ({_of(format_.between)} one)*" if parallel else ""
    if choice.forced or answer is not None:
        opening, wrapped = _of(format_.opening), _of(format_.closing)
        rules.append(f"one: {opening} call {wrapped}")
        rules.append(f"calls: {_of(format_.head)} one{more} {_of(format_.tail)}")
    else:
        rules += _free(format_, more)
    rules.append(_start(choice, answer))
    return grammar(LARK, "%llguidance {}\n" + "\n".join(rules), "tools")


def _check_size(offered: Sequence[dict[str, Any]]) -> None:
    """Before their schemas are looked into: that takes its time for each of them."""
    if sum(len(json.dumps(each.get("parameters"))) for each in offered) > MAX_GRAMMAR_BYTES:
        raise faults.invalid_value("tools", f"schemas of more than {MAX_GRAMMAR_BYTES} bytes")


def _of(text: str) -> str:
    return literal(text) if text else ""


def _call(format_: ToolFormat, function: dict[str, Any]) -> str:
    """One function's object, as text around the schema of its arguments."""
    schema = function.get("parameters") or _EMPTY
    if not can_end(schema):
        raise faults.invalid_value("tools", "the parameters of one require themselves")
    if "properties" in schema:
        # What is not declared is nothing that the tool would understand.
        schema = {"additionalProperties": False, **schema}
    name = json.dumps(function["name"], ensure_ascii=False)
    head = literal(f'{{"name": {name}, "{format_.key}": ')
    return f"{head} %json {json.dumps(schema | {'x-guidance': _EXACT})} {literal('}')}"


def _free(format_: ToolFormat, more: str) -> list[str]:
    """Text of any kind; where calls begin, calls of these forms and nothing behind them."""
    if not format_.marker:
        first = "".join(sorted({"{", "[", format_.head[:1] or "{"}))
        return [
            f"one: {_of(format_.opening)} call {_of(format_.closing)}",
            f"calls: {_of(format_.head)} one{more} {_of(format_.tail)}",
            f"TEXT: /[^{first.replace('[', chr(92) + '[')}](.|\\n)*/",
        ]
    rest = (format_.head + format_.opening).removeprefix(format_.marker)
    again = _of(format_.opening) if not format_.head else ""
    body = more.replace(" one", f" {again} call {_of(format_.closing)}")
    return [
        f"marked[lazy]: /(.|\\n)*/ {literal(format_.marker)}",
        f"calls: marked {_of(rest)} call {_of(format_.closing)}{body} {_of(format_.tail)}",
        "TEXT: /(.|\\n)*/",
    ]


def _start(choice: ToolChoice, answer: Grammar | None) -> str:
    if choice.forced:
        return "start: calls"
    if answer is None:
        return "start: calls | TEXT"
    if answer.kind != JSON_SCHEMA:
        raise faults.invalid_value(answer.param, "only a JSON schema can be combined with 'tools'")
    try:
        schema = json.loads(answer.source)
    except (ValueError, RecursionError):
        raise faults.invalid_value(answer.param, "it is not a JSON schema") from None
    exact = {"x-guidance": _EXACT}
    return (
        f"start: calls | answer\nanswer: %json {json.dumps(mapping(answer.param, schema) | exact)}"
    )
