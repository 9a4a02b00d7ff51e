"""The form that a client asks for: `response_format` as OpenAI has it, `structured_outputs` as vLLM
has it. Only the wrapping is checked here; what is inside is compiled, and refused, by a replica.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from events.grammar import JSON_SCHEMA, LARK, MAX_GRAMMAR_BYTES, REGEX, Grammar
from router.openai import faults
from router.openai.fields import Field, array, boolean, mapping, nested, one_of, string, walk

FORMATS = ("text", "json_object", "json_schema")
MAX_CHOICES = 1_024
_MAX_NAME_CHARS = 64
ANY_OBJECT = '{"type": "object"}'


def grammar(kind: str, source: str, param: str) -> Grammar:
    """A grammar of bounded size. Raises UserError."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise faults.invalid_value(param, f"more than {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(kind, source, param)


def _json_schema(path: str, value: Any) -> dict[str, Any]:
    return mapping(path, value)


_schema = nested(
    {
        "name": Field(None, string(_MAX_NAME_CHARS, 1), True),
        "description": Field(None, string()),
        "schema": Field("schema", _json_schema, True),
        # Whatever is asked for is enforced.
        "strict": Field(None, boolean),
    }
)


def response_format(path: str, value: Any) -> Grammar | None:
    """A reader of `response_format`; None for text."""
    kind = one_of(*FORMATS)(f"{path}.type", mapping(path, value).get("type"))
    fields = {"type": Field(None, string(), True)}
    if kind != "json_schema":
        walk(value, fields, path)
        return grammar(JSON_SCHEMA, ANY_OBJECT, path) if kind == "json_object" else None
    read = walk(value, fields | {"json_schema": Field("json_schema", _schema, True)}, path)
    return grammar(JSON_SCHEMA, json.dumps(read["json_schema"]["schema"]), path)


def _json(path: str, value: Any) -> Grammar:
    """A schema, or its text."""
    source = value if isinstance(value, str) else json.dumps(mapping(path, value))
    return grammar(JSON_SCHEMA, source, path)


def literal(text: str) -> str:
    """A string in a grammar, whose reader takes no bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _choice(path: str, value: Any) -> Grammar:
    several: Sequence[str] = array(string(minimum=1), "an array of strings", MAX_CHOICES, 1)(
        path, value
    )
    return grammar(LARK, "start: " + " | ".join(map(literal, several)), path)


def _object(path: str, value: Any) -> Grammar:
    if not boolean(path, value):
        raise faults.invalid_value(path, "it can only be true")
    return grammar(JSON_SCHEMA, ANY_OBJECT, path)


def _text(kind: str) -> Any:
    return lambda path, value: grammar(kind, string(minimum=1)(path, value), path)


_OUTPUTS = {
    "json": Field("json", _json),
    "json_object": Field("json_object", _object),
    "regex": Field("regex", _text(REGEX)),
    "choice": Field("choice", _choice),
    "grammar": Field("grammar", _text(LARK)),
}


def structured_outputs(path: str, value: Any) -> Grammar:
    """A reader of `structured_outputs`: exactly one of its ways."""
    found = walk(mapping(path, value), _OUTPUTS, path)
    if len(found) != 1:
        names = ", ".join(f"'{name}'" for name in _OUTPUTS)
        raise faults.invalid_value(path, f"it needs exactly one of {names}")
    only: Grammar = next(iter(found.values()))
    return only
