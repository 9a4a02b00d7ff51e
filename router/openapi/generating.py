"""Bodies of the two generating routes. The parser in router.openai has the last word: what a JSON
schema can't say (two parameters that exclude each other, the length of the context) it refuses."""

from __future__ import annotations

from router.openai.messages import ROLES
from router.openai.parameters import DONE_ANYWAY
from router.openai.schema import Limits
from router.openai.structured import MAX_CHOICES
from router.openai.tools.choice import MODES
from router.openapi.parts import (
    ANYTHING,
    BOOLEAN,
    NULL,
    Json,
    items,
    number,
    one_of,
    optional,
    record,
    reference,
    text,
    whole,
)

_NAME = text(64)
_CALL = record(
    {
        "id": text(256),
        "type": one_of("function"),
        "function": record(
            {"name": text(64, 1), "arguments": text(1_048_576)}, ("name", "arguments")
        ),
    },
    ("id", "type", "function"),
)
_TOOL = record(
    {
        "type": one_of("function"),
        "function": record(
            {
                "name": text(64, 1),
                **optional({"description": text(), "parameters": ANYTHING, "strict": BOOLEAN}),
            },
            ("name",),
        ),
    },
    ("type", "function"),
)
_PARTS = items(record({"type": one_of("text"), "text": text()}, ("type", "text")), 1_024, 1)
_CONTENT: Json = {"anyOf": [text(), _PARTS]}


def _messages(limits: Limits) -> Json:
    plain = record(
        {
            "role": one_of(*(role for role in ROLES if role not in ("assistant", "tool"))),
            "content": _CONTENT,
            **optional({"name": _NAME}),
        },
        ("role", "content"),
    )
    tool = record(
        {
            "role": one_of("tool"),
            "content": _CONTENT,
            "tool_call_id": text(256),
            **optional({"name": _NAME}),
        },
        ("role", "content", "tool_call_id"),
    )
    own: Json = {"name": _NAME, "annotations": {"type": "array", "maxItems": 0}}
    said = {"role": one_of("assistant"), "content": _CONTENT}
    assistants = [record(said | optional(own), ("role", "content"))]
    if limits.tool_calls:
        calls = {"tool_calls": items(_CALL, 128, 1)}
        called = {"role": one_of("assistant")} | optional(own | {"content": _CONTENT}) | calls
        assistants.append(record(called, ("role", "tool_calls")))
    return items({"anyOf": [plain, tool, *assistants]}, limits.max_messages, 1)


def _tool_choice(limits: Limits) -> Json:
    if not limits.grammars:
        return one_of("none", "auto")
    function = record({"name": text(64, 1)}, ("name",))
    named = record({"type": one_of("function"), "function": function}, ("type", "function"))
    return {"anyOf": [one_of(*MODES), named]}


def _forms(limits: Limits) -> Json:
    """What the form of an answer can be; a schema or regex that can't be enforced is refused."""
    plain = record({"type": one_of("text")}, ("type",))
    if not limits.grammars:
        return {"response_format": plain}
    named = {"name": text(64, 1), "schema": ANYTHING}
    schema = record(
        {**named, **optional({"description": text(), "strict": BOOLEAN})}, ("name", "schema")
    )
    whole = record({"type": one_of("json_schema"), "json_schema": schema}, ("type", "json_schema"))
    any_json = record({"type": one_of("json_object")}, ("type",))
    ways = {
        "json": {"anyOf": [ANYTHING, text()]},
        "json_object": one_of(True),
        "regex": text(minimum=1),
        "choice": items(text(minimum=1), MAX_CHOICES, 1),
        "grammar": text(minimum=1),
    }
    return {
        "response_format": {"anyOf": [plain, any_json, whole]},
        "structured_outputs": record(optional(ways), minProperties=1),
    }


def _shared(limits: Limits) -> Json:
    token_id = whole(0, limits.vocab - 1)
    stop = text(limits.max_stop_chars, 1)
    names = {"pattern": r"^(0|[1-9][0-9]{0,2})$"}
    labels = {
        "type": "object",
        "additionalProperties": text(512),
        "maxProperties": 16,
    }
    options = record(optional({"include_usage": BOOLEAN, "include_obfuscation": one_of(False)}))
    return {
        "stream": BOOLEAN,
        "stream_options": options,
        "n": whole(1, limits.max_n),
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": whole(-1, limits.vocab),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.01, 10),
        "logit_bias": {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": number(-100, 100),
            "maxProperties": limits.max_bias_entries,
        },
        "seed": whole(-(2**63), 2**63 - 1),
        "stop": {"anyOf": [stop, items(stop, limits.max_stops)]},
        "min_tokens": whole(0),
        "ignore_eos": BOOLEAN,
        "stop_token_ids": items(token_id, limits.max_stop_token_ids),
        "bad_words": items(text(limits.max_bad_word_chars, 1), limits.max_bad_words),
        **_forms(limits),
        "user": text(512),
        "metadata": labels,
        "store": BOOLEAN,
        "service_tier": one_of("auto", "default", "flex", "scale", "priority"),
        "safety_identifier": text(512),
        "prompt_cache_key": text(512),
        **{name: one_of(value) for name, (value, _) in DONE_ANYWAY.items()},
    }


def chat_request(limits: Limits) -> Json:
    """POST /v1/chat/completions."""
    rest = {
        **_shared(limits),
        "max_tokens": whole(1),
        "max_completion_tokens": whole(1),
        "logprobs": BOOLEAN,
        "top_logprobs": whole(0, 20),
        "modalities": one_of(["text"]),
        "tools": items(_TOOL, limits.max_tools, 1),
        "tool_choice": _tool_choice(limits),
        "parallel_tool_calls": BOOLEAN if limits.grammars else one_of(True),
    }
    named = {"model": one_of(*sorted(limits.models)), "messages": _messages(limits)}
    return record({**named, **optional(rest)}, ("model", "messages"))


def completion_request(limits: Limits) -> Json:
    """POST /v1/completions."""
    tokens = items(whole(0, limits.vocab - 1), limits.context_tokens - 1, 1)
    prompt = {"anyOf": [text(), tokens]}
    rest = {
        **_shared(limits),
        "max_tokens": whole(1),
        "logprobs": whole(0, 5),
        "echo": BOOLEAN,
        "best_of": whole(1, limits.max_n),
    }
    named = {
        "model": one_of(*sorted(limits.models)),
        "prompt": {"anyOf": [*prompt["anyOf"], items(prompt, limits.max_prompts, 1)]},
    }
    return record({**named, **optional(rest)}, ("model", "prompt"))


_COUNT = whole(0)
USAGE: Json = {
    "type": "object",
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": _COUNT},
            "required": ["cached_tokens"],
        },
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
}
_FINISH = one_of("stop", "length", "tool_calls")
_LOGPROBS: Json = {"anyOf": [ANYTHING, NULL]}


def _answer(kind: str, choice: Json, required: list[str]) -> Json:
    choices = {"type": "object", "properties": choice, "required": required}
    return {
        "type": "object",
        "properties": {
            "id": text(),
            "object": one_of(kind),
            "created": _COUNT,
            "model": text(),
            "choices": {"type": "array", "items": choices, "minItems": 1},
            "usage": reference("Usage"),
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }


CHAT_ANSWER = _answer(
    "chat.completion",
    {
        "index": _COUNT,
        "message": {
            "type": "object",
            "properties": {
                "role": one_of("assistant"),
                "content": {"type": ["string", "null"]},
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
            },
            "required": ["role", "content"],
        },
        "finish_reason": _FINISH,
        "logprobs": _LOGPROBS,
    },
    ["index", "message", "finish_reason"],
)
COMPLETION_ANSWER = _answer(
    "text_completion",
    {"index": _COUNT, "text": text(), "finish_reason": _FINISH, "logprobs": _LOGPROBS},
    ["index", "text", "finish_reason", "logprobs"],
)
