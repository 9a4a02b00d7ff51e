"""The bodies of the two generating routes: bytes to a typed request, or OpenAI's 400 and 404.

Each parameter of the API is in a table here: read, accepted without effect, or refused by name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from router.openai import faults
from router.openai.body import load_object
from router.openai.fields import (
    Field,
    Reader,
    Table,
    array,
    boolean,
    decimal,
    integer,
    mapping,
    nested,
    one_of,
    only,
    string,
    walk,
)
from router.openai.messages import messages, tool_choice, tools
from router.openai.schema import ChatRequest, CompletionRequest, Controls, Limits

_CONTROLS = frozenset(Controls.__dataclass_fields__)
_PROMPT = "one of a string, array of strings, array of integers, or array of arrays of integers"
_MAX_LABEL_CHARS = 512
_SEED_LIMIT = 2**63
_DECIMAL_ID = re.compile(r"[0-9]{1,10}")


def _without_effect(path: str, value: Any) -> None:
    """Metadata: up to 16 short strings by name."""
    pairs = mapping(path, value)
    if len(pairs) > 16:
        raise faults.invalid_value(path, "more than 16 entries")
    for entry in pairs.values():
        string(_MAX_LABEL_CHARS)(path, entry)


_ACCEPTED_WITHOUT_EFFECT: Table = {
    "user": Field(None, string(_MAX_LABEL_CHARS)),
    "metadata": Field(None, _without_effect),
    "store": Field(None, boolean),
    "service_tier": Field(None, one_of("auto", "default", "flex", "scale", "priority")),
    "safety_identifier": Field(None, string(_MAX_LABEL_CHARS)),
    "prompt_cache_key": Field(None, string(_MAX_LABEL_CHARS)),
}


def _stop(limits: Limits) -> Reader:
    one = string(limits.max_stop_chars, minimum=1)
    several = array(one, "one of a string or array of strings", limits.max_stops)

    def read(path: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (one(path, value),)
        return tuple(several(path, value))

    return read


def _logit_bias(limits: Limits) -> Reader:
    bias = decimal(-100.0, 100.0)

    def read(path: str, value: Any) -> dict[int, float]:
        entries = mapping(path, value)
        if len(entries) > limits.max_bias_entries:
            raise faults.invalid_value(path, f"more than {limits.max_bias_entries} entries")
        for name in entries:
            if not _DECIMAL_ID.fullmatch(name) or int(name) >= limits.vocab:
                raise faults.invalid_value(path, "its names must be token ids of this model")
        return {int(name): bias(path, amount) for name, amount in entries.items()}

    return read


def _top_k(limits: Limits) -> Reader:
    """0 and -1 both mean off."""
    read = integer(-1, limits.vocab)
    return lambda path, value: max(0, read(path, value))


def _shared(limits: Limits) -> Table:
    """What both routes have."""
    token_id = integer(0, limits.vocab - 1)
    token_ids = array(token_id, "an array of integers", limits.max_stop_token_ids)
    penalty = decimal(-2.0, 2.0)
    options: Table = {
        "include_usage": Field("include_usage", boolean),
        "include_obfuscation": Field(None, only(False, "can't be true: nothing is padded")),
    }
    return {
        "model": Field("model", string(), True),
        "stream": Field("stream", boolean),
        "stream_options": Field("stream_options", nested(options)),
        "n": Field("n", integer(1, limits.max_n)),
        "temperature": Field("temperature", decimal(0.0, 2.0)),
        "top_p": Field("top_p", decimal(0.0, 1.0)),
        "top_k": Field("top_k", _top_k(limits)),
        "min_p": Field("min_p", decimal(0.0, 1.0)),
        "presence_penalty": Field("presence_penalty", penalty),
        "frequency_penalty": Field("frequency_penalty", penalty),
        "repetition_penalty": Field("repetition_penalty", decimal(0.01, 10.0)),
        "logit_bias": Field("logit_bias", _logit_bias(limits)),
        "seed": Field("seed", integer(-_SEED_LIMIT, _SEED_LIMIT - 1)),
        "stop": Field("stop", _stop(limits)),
        "min_tokens": Field("min_tokens", integer(0)),
        "ignore_eos": Field("ignore_eos", boolean),
        "stop_token_ids": Field(
            "stop_token_ids", lambda path, value: tuple(token_ids(path, value))
        ),
        **_ACCEPTED_WITHOUT_EFFECT,
    }


def _response_format(path: str, value: Any) -> None:
    """Only text: a schema that isn't enforced would be a lie."""
    known = ("text", "json_object", "json_schema")
    kind = one_of(*known)(f"{path}.type", mapping(path, value).get("type"))
    if kind != "text":
        raise faults.unsupported_value(f"{path}.type", "must be 'text': output is not constrained")
    walk(value, {"type": Field(None, string(), True)}, path)


_UNSUPPORTED_IN_CHAT = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
)


@lru_cache(maxsize=16)
def _chat_table(limits: Limits) -> Table:
    return {
        **_shared(limits),
        "messages": Field("messages", messages(limits.max_messages, limits.tool_calls), True),
        "max_tokens": Field("max_tokens", integer(1)),
        "max_completion_tokens": Field("max_completion_tokens", integer(1)),
        "logprobs": Field("logprobs", boolean),
        "top_logprobs": Field("top_logprobs", integer(0, 20)),
        "tools": Field("tools", tools(limits.max_tools)),
        "tool_choice": Field("tool_choice", tool_choice),
        "parallel_tool_calls": Field(
            "parallel_tool_calls", only(True, "can't be false: calls are not constrained")
        ),
        "response_format": Field(None, _response_format),
        "modalities": Field(None, only(["text"], "must be ['text']")),
        **dict.fromkeys(_UNSUPPORTED_IN_CHAT, faults.unsupported),
    }


@lru_cache(maxsize=16)
def _completion_table(limits: Limits) -> Table:
    return {
        **_shared(limits),
        "prompt": Field("prompts", _prompt(limits), True),
        "max_tokens": Field("max_tokens", integer(0)),
        "logprobs": Field("logprobs", integer(0, 5)),
        "echo": Field("echo", boolean),
        "best_of": Field(None, only(1, "must be 1: answers are not ranked")),
        "suffix": faults.unsupported,
    }


def _plain_ids(value: list[Any], vocab: int) -> bool:
    """The quick check of the usual case; the reader names the mistake in the others."""
    return {type(entry) for entry in value} == {int} and min(value) >= 0 and max(value) < vocab


def _token_prompt(limits: Limits) -> Reader:
    token_id = integer(0, limits.vocab - 1)

    def read(path: str, value: list[Any]) -> bytes:
        if len(value) >= limits.context_tokens:
            raise faults.prompt_too_long("prompt", limits.context_tokens, len(value))
        if not _plain_ids(value, limits.vocab):
            value = [token_id(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
        return struct.pack(f"<{len(value)}I", *value)

    return read


def _prompt(limits: Limits) -> Reader:
    """A text, texts, token ids, or arrays of token ids: to a tuple of prompts."""
    tokens = _token_prompt(limits)

    def one(path: str, value: Any) -> str | bytes:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise faults.invalid_type(path, "one of a string or array of integers", value)
        if not value:
            raise faults.empty_array(path)
        return tokens(path, value)

    several = array(one, _PROMPT, limits.max_prompts, minimum=1)

    def read(path: str, value: Any) -> tuple[str | bytes, ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise faults.invalid_type(path, _PROMPT, value)
        if value and isinstance(value[0], (int, float)):
            return (tokens(path, value),)
        return tuple(several(path, value))

    return read


def _check_model(body: Mapping[str, Any], limits: Limits) -> None:
    """First of all, as OpenAI does: another parameter may be right for another model."""
    name = body.get("model")
    if isinstance(name, str) and name not in limits.models:
        raise faults.model_not_found(name)


def _take_stream(values: dict[str, Any]) -> None:
    """Fold `stream_options` into `include_usage`."""
    options = values.pop("stream_options", None)
    if options is None:
        return
    if not values.get("stream"):
        raise faults.refusal(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    values["include_usage"] = options.get("include_usage", False)


def _take_controls(values: dict[str, Any]) -> Controls:
    controls = {name: values.pop(name) for name in list(values) if name in _CONTROLS}
    result = Controls(**controls)
    if result.max_tokens is not None and result.min_tokens > result.max_tokens:
        raise faults.above_max("min_tokens", "integer", result.max_tokens, result.min_tokens)
    return result


def _take_answer_length(values: dict[str, Any]) -> None:
    """`max_tokens` is the older name of `max_completion_tokens`."""
    newer = values.pop("max_completion_tokens", None)
    if newer is None:
        return
    if "max_tokens" in values:
        raise faults.refusal(
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
            param="max_tokens",
            code="invalid_parameter_combination",
        )
    values["max_tokens"] = newer


def _take_chat_logprobs(values: dict[str, Any]) -> None:
    """The flag and the number of alternatives become one number, or None."""
    wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top is not None and not wanted:
        raise faults.refusal(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            param="top_logprobs",
            code="invalid_value",
        )
    if wanted:
        values["logprobs"] = top or 0


def _take_tools(values: dict[str, Any], limits: Limits) -> None:
    """Tools that the model would never see are refused; "none" leaves them out on purpose."""
    choice = values.pop("tool_choice", None)
    parallel = values.pop("parallel_tool_calls", None)
    if "tools" in values:
        if not limits.tools:
            raise faults.unsupported("tools", "is not supported by this model's chat template")
        if choice == "none":
            del values["tools"]
        return
    for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
        if value is not None:
            raise faults.invalid_value(name, f"'{name}' is only allowed when 'tools' are specified")


def parse_chat(body: bytes, limits: Limits) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises UserError."""
    document = load_object(body)
    _check_model(document, limits)
    values = walk(document, _chat_table(limits))
    _take_stream(values)
    _take_answer_length(values)
    _take_chat_logprobs(values)
    _take_tools(values, limits)
    return ChatRequest(controls=_take_controls(values), **values)


def _check_completion(request: CompletionRequest, limits: Limits) -> None:
    controls = request.controls
    choices = len(request.prompts) * controls.n
    if choices > limits.max_choices:
        raise faults.invalid_value("n", f"more than {limits.max_choices} choices in all")
    if request.echo and controls.logprobs is not None:
        raise faults.unsupported_value("echo", "can't be combined with 'logprobs'")
    if controls.max_tokens == 0:
        raise faults.unsupported_value("max_tokens", "must be at least 1")


def parse_completion(body: bytes, limits: Limits) -> CompletionRequest:
    """The body of POST /v1/completions. Raises UserError."""
    document = load_object(body)
    _check_model(document, limits)
    values = walk(document, _completion_table(limits))
    _take_stream(values)
    request = CompletionRequest(controls=_take_controls(values), **values)
    _check_completion(request, limits)
    return request
