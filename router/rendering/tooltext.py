"""Tools for models whose chat template knows nothing of them: told in words, as the card of SmolLM2
does, and past calls and results written as text. What a model called is written as it wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.openai.tools.formats import SMOLLM

_INSTRUCTION = """You are an expert in composing functions. You are given a question and a set of \
possible functions. Based on the question, you will need to make one or more function/tool calls \
to achieve the purpose. If none of the functions can be used, answer without them.

You have access to the following tools:
<tools>{tools}</tools>

The output of a call MUST strictly adhere to the following format:
<tool_call>[{{"name": "func_name1", "arguments": {{"argument1": "value1"}}}}, ...]</tool_call>"""


def needs_words(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> bool:
    """Whether there is anything of tools in a conversation."""
    return bool(tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in messages
    )


def in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same conversation with roles "system", "user" and "assistant" only."""
    found: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        role = message["role"]
        if role != "tool":
            found.append(_without_calls(message))
        elif before == "tool":
            # Results of one turn are one turn of the user, whose turn it would be.
            found[-1]["content"] += f"\n{_result(message)}"
        else:
            found.append({"role": "user", "content": _result(message)})
        before = role
    if tools:
        _instruct(found, tools)
    return found


def _result(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return dict(message)
    calls = SMOLLM.between.join(_written(call["function"]) for call in message["tool_calls"])
    text = "\n".join(filter(None, (message["content"], f"{SMOLLM.head}{calls}{SMOLLM.tail}")))
    return {"role": message["role"], "content": text}


def _written(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return json.dumps({"name": function["name"], SMOLLM.key: value}, ensure_ascii=False)


def _instruct(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    text = _INSTRUCTION.format(tools=listed)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})
