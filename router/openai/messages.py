"""Messages and tools of a chat request: JSON to the shape that chat templates take."""

from __future__ import annotations

from typing import Any

from router.openai import faults
from router.openai.fields import (
    Field,
    Reader,
    Table,
    array,
    boolean,
    mapping,
    nested,
    one_of,
    only,
    string,
    walk,
)

_PLAIN_ROLES = ("system", "user", "assistant")
ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_NAME_CHARS = 64
_MAX_ID_CHARS = 256
_MAX_TOOL_DEPTH = 32
_MAX_TOOLS_VALUES = 32_768
_MAX_ARGUMENTS_CHARS = 1_048_576
_MAX_PARTS = 1_024
_MAX_TOOL_CALLS = 128
_TEXT_PART = {"type": Field(None, string()), "text": Field("text", string(), True)}
_CONTENT = "one of a string or array of objects"


def _part(path: str, value: Any) -> str:
    """The text of one content part. Raises UserError for anything but text."""
    part = mapping(path, value)
    kind = string()(f"{path}.type", part.get("type"))
    if kind != "text":
        raise faults.unsupported_value(f"{path}.type", "must be 'text': this model reads text only")
    text: str = walk(part, _TEXT_PART, path)["text"]
    return text


_parts = array(_part, _CONTENT, _MAX_PARTS, minimum=1)


def _content(path: str, value: Any) -> str:
    """A string, or parts joined without a separator: both give the same prompt."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise faults.invalid_type(path, _CONTENT, value)
    return "".join(_parts(path, value))


_Container = dict[str, Any] | list[Any]


def _inner(value: _Container) -> list[_Container]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, (dict, list))]


def _depth_within(value: _Container, limit: int = _MAX_TOOL_DEPTH) -> bool:
    return limit > 0 and all(_depth_within(child, limit - 1) for child in _inner(value))


def _values(value: _Container) -> int:
    """How many values it holds, at any depth."""
    return len(value) + sum(map(_values, _inner(value)))


def _schema(path: str, value: Any) -> dict[str, Any]:
    schema = mapping(path, value)
    if not _depth_within(schema):
        raise faults.invalid_value(path, f"nested more than {_MAX_TOOL_DEPTH} levels")
    return schema


_call = nested(
    {
        "id": Field("id", string(_MAX_ID_CHARS), True),
        "type": Field("type", one_of("function"), True),
        "function": Field(
            "function",
            nested(
                {
                    "name": Field("name", string(_MAX_NAME_CHARS, 1), True),
                    "arguments": Field("arguments", string(_MAX_ARGUMENTS_CHARS), True),
                }
            ),
            True,
        ),
    }
)

_tool = nested(
    {
        "type": Field("type", one_of("function"), True),
        "function": Field(
            "function",
            nested(
                {
                    "name": Field("name", string(_MAX_NAME_CHARS, 1), True),
                    "description": Field("description", string()),
                    "parameters": Field("parameters", _schema),
                    "strict": Field("strict", boolean),
                }
            ),
            True,
        ),
    }
)

_BASE = {
    "role": Field("role", one_of(*ROLES), True),
    "name": Field("name", string(_MAX_NAME_CHARS)),
}
_TEXT = {**_BASE, "content": Field("content", _content, True)}
_TOOL = {**_TEXT, "tool_call_id": Field("tool_call_id", string(_MAX_ID_CHARS), True)}
_ASSISTANT: Table = {
    **_BASE,
    "content": Field("content", _content),
    "tool_calls": Field(
        "tool_calls", array(_call, "an array of objects", _MAX_TOOL_CALLS, minimum=1)
    ),
    # Clients send our own answers back as they came.
    "annotations": Field(None, only([], "must be empty: this model reads text only")),
    "refusal": faults.unsupported,
    "audio": faults.unsupported,
    "function_call": faults.unsupported,
}
_TABLES: dict[str, Table] = {"tool": _TOOL, "assistant": _ASSISTANT}


def _plain(value: Any) -> bool:
    """A role and a text, as nearly every message is: nothing to check further or to change."""
    return (
        type(value) is dict
        and len(value) == 2
        and value.get("role") in _PLAIN_ROLES
        and type(value.get("content")) is str
    )


def _message(path: str, value: Any, tool_calls: bool) -> dict[str, Any]:
    if _plain(value):
        return value
    message = mapping(path, value)
    if "role" not in message:
        raise faults.missing(f"{path}.role")
    role = one_of(*ROLES)(f"{path}.role", message["role"])
    fields = walk(message, _TABLES.get(role, _TEXT), path)
    if "tool_calls" in fields and not tool_calls:
        raise faults.unsupported(f"{path}.tool_calls", "is not shown by this model's chat template")
    if "content" not in fields and "tool_calls" not in fields:
        raise faults.invalid_type(f"{path}.content", _CONTENT, None)
    fields["role"] = "system" if role == "developer" else role
    fields.setdefault("content", "")
    return fields


def messages(maximum: int, tool_calls: bool) -> Reader:
    """A reader of `messages`; `tool_calls`: whether past calls can be shown to the model."""
    return array(
        lambda path, value: _message(path, value, tool_calls),
        "an array of objects",
        maximum,
        minimum=1,
    )


def tools(maximum: int) -> Reader:
    """A reader of `tools`: function definitions only, of bounded size in all."""
    several = array(_tool, "an array of objects", maximum, minimum=1)

    def read(path: str, value: Any) -> list[Any]:
        found = several(path, value)
        if _values(found) > _MAX_TOOLS_VALUES:
            raise faults.invalid_value(path, f"more than {_MAX_TOOLS_VALUES} values in all")
        return found

    return read
