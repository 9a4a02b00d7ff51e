"""One spelling for conversations that mean the same, so that they get the same tokens."""

from __future__ import annotations

import json
from typing import Any

from configs.model.errors import TemplateError

MAX_DEPTH = 64


def check(value: Any, depth: int = 0) -> None:
    """Raise TemplateError for what is nested too deeply and for text that no encoding can carry."""
    if depth > MAX_DEPTH:
        raise TemplateError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        if value.isascii():
            return
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TemplateError("the text holds half of a surrogate pair") from None
    elif isinstance(value, dict):
        for key, each in value.items():
            check(key, depth + 1)
            check(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            check(each, depth + 1)


def _content(content: Any) -> str:
    """A string as it is, text parts joined, nothing as the empty string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("'content' must be a string or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise TemplateError("only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise TemplateError("a part of type 'text' needs a string 'text'")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> Any:
    """A tool call whose arguments, JSON in a string on the wire, are an object, as templates
    expect. What isn't an object stays the string that it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TemplateError("every message must be an object with a string 'role'")
    role = "system" if message["role"] == "developer" else message["role"]
    found = message | {"role": role, "content": _content(message.get("content"))}
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def normalise(messages: Any) -> list[dict[str, Any]]:
    """A copy with "developer" as "system", content as one string, arguments as objects.

    Raises TemplateError for messages that are malformed, nested too deeply or not Unicode.
    """
    if not isinstance(messages, list) or not messages:
        raise TemplateError("'messages' must be a list with at least one message")
    check(messages)
    found = [_message(message) for message in messages]
    if any("tool_calls" in message for message in found):
        check(found)  # what was a string has become objects
    return found
