"""How families of models write calls of tools, and which family a chat template belongs to."""

from __future__ import annotations

from msgspec import Struct


class ToolFormat(Struct, frozen=True):
    """One or more calls are `head call (between call)* tail`; a call is `opening`, an object with
    "name" and `key`, `closing`. `marker`: what says that calls begin; where it is empty they stand
    at the beginning of the answer, bare."""

    name: str
    key: str = "arguments"
    head: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    tail: str = ""
    marker: str = ""
    end_marker: str = ""


HERMES = ToolFormat(
    "hermes",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    between="\n",
    marker="<tool_call>",
    end_marker="</tool_call>",
)
"""Hermes 2 and 3, Qwen 2.5 and 3."""

SMOLLM = ToolFormat(
    "smollm",
    head="<tool_call>[",
    between=", ",
    tail="]</tool_call>",
    marker="<tool_call>",
    end_marker="</tool_call>",
)
"""SmolLM2 as its model card says; also for templates that know nothing of tools."""

LLAMA = ToolFormat("llama", key="parameters", between="; ")
"""Llama 3.1 and later, its JSON form."""

MISTRAL = ToolFormat("mistral", head="[", between=", ", tail="]")
"""Its own marker is a special token: no part of the text."""

_SIGNS = (("<tool_call>", HERMES), ("[TOOL_CALLS]", MISTRAL), ('"parameters"', LLAMA))


def format_of(source: str, supports_tools: bool) -> ToolFormat:
    """The format that a chat template teaches."""
    if not supports_tools:
        return SMOLLM
    return next((found for sign, found in _SIGNS if sign in source), HERMES)
