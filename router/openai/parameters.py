"""Parameters of the generating routes: read, accepted without effect, or refused by name."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from events.errors import UserError
from router.openai import faults
from router.openai.fields import (
    Field,
    Reader,
    Table,
    WideTable,
    array,
    boolean,
    decimal,
    integer,
    mapping,
    nested,
    one_of,
    only,
    string,
)
from router.openai.messages import messages, tools
from router.openai.schema import Limits
from router.openai.structured import response_format, structured_outputs
from router.openai.tools.choice import tool_choice

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

DONE_ANYWAY = {
    "skip_special_tokens": (True, "can't be false: they are never shown"),
    "no_stop_trim": (False, "can't be true: stop strings are never shown"),
    "continue_final_message": (False, "can't be true: a new message is begun"),
    "return_hidden_states": (False, "can't be true: they never leave the engine"),
    **dict.fromkeys(
        ("include_reasoning", "separate_reasoning", "stream_reasoning"),
        (True, "can't be false: no reasoning is told apart"),
    ),
}
"""SGLang's and vLLM's routers say these to every server: the value that means what we do, and why
no other does."""


def _stop(limits: Limits) -> Reader:
    one = string(limits.max_stop_chars, minimum=1)
    several = array(one, "one of a string or array of strings", limits.max_stops)

    def read(path: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (one(path, value),)
        return tuple(several(path, value))

    return read


def _bad_words(limits: Limits) -> Reader:
    several = array(
        string(limits.max_bad_word_chars, minimum=1), "an array of strings", limits.max_bad_words
    )

    def read(path: str, value: Any) -> tuple[str, ...]:
        words = several(path, value)
        if not all(word.strip() for word in words):
            raise faults.invalid_value(path, "a word of nothing but blanks")
        return tuple(words)

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


_OLDER_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def _older_name(path: str) -> UserError:
    """vLLM's names of before."""
    return faults.unsupported(path, "has become 'structured_outputs'")


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
        "bad_words": Field("bad_words", _bad_words(limits)),
        "response_format": Field("response_format", response_format),
        "structured_outputs": Field("structured_outputs", structured_outputs),
        **dict.fromkeys(_OLDER_NAMES, _older_name),
        **_ACCEPTED_WITHOUT_EFFECT,
        **{name: Field(None, only(*said)) for name, said in DONE_ANYWAY.items()},
    }


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
def chat_table(limits: Limits) -> Table:
    """The parameters of POST /v1/chat/completions."""
    return WideTable(
        {
            **_shared(limits),
            "messages": Field("messages", messages(limits.max_messages, limits.tool_calls), True),
            "max_tokens": Field("max_tokens", integer(1)),
            "max_completion_tokens": Field("max_completion_tokens", integer(1)),
            "logprobs": Field("logprobs", boolean),
            "top_logprobs": Field("top_logprobs", integer(0, 20)),
            "tools": Field("tools", tools(limits.max_tools)),
            "tool_choice": Field("tool_choice", tool_choice),
            "parallel_tool_calls": Field("parallel_tool_calls", boolean),
            "modalities": Field(None, only(["text"], "must be ['text']")),
            **dict.fromkeys(_UNSUPPORTED_IN_CHAT, faults.unsupported),
        }
    )


def _plain_ids(value: list[Any], vocab: int) -> bool:
    """The quick check of the usual case; the reader names the mistake in the others."""
    return {type(entry) for entry in value} == {int} and min(value) >= 0 and max(value) < vocab


def _token_prompt(limits: Limits) -> Callable[[str, list[Any]], bytes]:
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


@lru_cache(maxsize=16)
def completion_table(limits: Limits) -> Table:
    """The parameters of POST /v1/completions."""
    return WideTable(
        {
            **_shared(limits),
            "prompt": Field("prompts", _prompt(limits), True),
            "max_tokens": Field("max_tokens", integer(0)),
            "logprobs": Field("logprobs", integer(0, 5)),
            "echo": Field("echo", boolean),
            "best_of": Field("best_of", integer(1, limits.max_n)),
            "suffix": faults.unsupported,
        }
    )
