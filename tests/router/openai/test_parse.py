"""Good requests: every parameter arrives where it belongs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from events.grammar import JSON_SCHEMA, LARK, REGEX
from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import ChatRequest, CompletionRequest, Controls, Limits
from tests.router.openai.bodies import BOTH, USER, Parse, chat_body, completion_body

SHARED = {
    "n": (2, 2),
    "temperature": (0, 0.0),
    "top_p": (0.5, 0.5),
    "top_k": (40, 40),
    "min_p": (0.1, 0.1),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (2, 2.0),
    "repetition_penalty": (1.1, 1.1),
    "logit_bias": ({"5": -100, "7": 1.5}, {5: -100.0, 7: 1.5}),
    "seed": (-(2**63), -(2**63)),
    "stop": ("end", ("end",)),
    "min_tokens": (0, 0),
    "ignore_eos": (True, True),
    "bad_words": (["no", " way"], ("no", " way")),
    "stop_token_ids": ([1, 2], (1, 2)),
    "max_tokens": (9, 9),
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@BOTH
@pytest.mark.parametrize("name", SHARED)
def test_a_control_arrives(parse: Parse, body: Any, name: str, limits: Limits) -> None:
    said, expected = SHARED[name]
    controls = parse(body(**{name: said}), limits).controls
    assert getattr(controls, name) == expected
    assert type(getattr(controls, name)) is type(expected)


@BOTH
@pytest.mark.parametrize("name", [*SHARED, "stream", "stream_options", "user", "logprobs"])
def test_null_is_absent(parse: Parse, body: Any, name: str, limits: Limits) -> None:
    assert parse(body(**{name: None}), limits) == parse(body(), limits)


@BOTH
def test_what_is_accepted_has_no_effect(parse: Parse, body: Any, limits: Limits) -> None:
    accepted = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert parse(body(**accepted), limits) == parse(body(), limits)


def test_a_plain_chat(limits: Limits) -> None:
    assert parse_chat(chat_body(), limits) == ChatRequest("tiny", [USER], Controls())


def test_a_plain_completion(limits: Limits) -> None:
    assert parse_completion(completion_body(), limits) == CompletionRequest(
        "tiny", ("hi",), Controls()
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 258], (b"\1\0\0\0\2\1\0\0",)),
        ([1.0, 2], (b"\1\0\0\0\2\0\0\0",)),
        ([[1], [2]], (b"\1\0\0\0", b"\2\0\0\0")),
        (["a", [1]], ("a", b"\1\0\0\0")),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[str | bytes, ...], limits: Limits) -> None:
    assert parse_completion(completion_body(prompt=prompt), limits).prompts == prompts


def test_top_k_minus_one_is_off(limits: Limits) -> None:
    assert parse_chat(chat_body(top_k=-1), limits).controls.top_k == 0


def test_the_newer_name_of_max_tokens(limits: Limits) -> None:
    assert parse_chat(chat_body(max_completion_tokens=5), limits).controls.max_tokens == 5


def test_stop_may_be_several_or_none(limits: Limits) -> None:
    assert parse_chat(chat_body(stop=["a", "b"]), limits).controls.stop == ("a", "b")
    assert parse_chat(chat_body(stop=[]), limits).controls.stop == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_P10_chat_logprobs(fields: dict, expected: int | None, limits: Limits) -> None:
    assert parse_chat(chat_body(**fields), limits).controls.logprobs == expected


@pytest.mark.parametrize("number", [0, 5])
def test_P10_completion_logprobs(number: int, limits: Limits) -> None:
    assert parse_completion(completion_body(logprobs=number), limits).controls.logprobs == number


@BOTH
@pytest.mark.parametrize(
    ("options", "include"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "include_obfuscation": False}, True),
    ],
)
def test_P1_stream_options(
    parse: Parse, body: Any, options: Any, include: bool, limits: Limits
) -> None:
    request = parse(body(stream=True, stream_options=options), limits)
    assert (request.stream, request.include_usage) == (True, include)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_P14_parts_equal_the_string(role: str, limits: Limits) -> None:
    def messages(content: Any) -> list:
        message = {"role": role, "content": content}
        return [message | {"tool_call_id": "c"} if role == "tool" else message]

    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    by_parts = parse_chat(chat_body(messages=messages(parts)), limits)
    assert by_parts == parse_chat(chat_body(messages=messages("a b")), limits)
    assert by_parts.messages[0]["role"] == ("system" if role == "developer" else role)


def test_an_answer_comes_back_as_clients_send_it(limits: Limits) -> None:
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    request = parse_chat(chat_body(messages=[USER, answer, USER]), limits)
    assert request.messages[1] == {"role": "assistant", "content": "yes"}


def test_past_tool_calls(limits: Limits) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    request = parse_chat(chat_body(messages=history), limits)
    assert request.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert request.messages[2] == history[2]


def test_tools(limits: Limits) -> None:
    assert parse_chat(chat_body(tools=[TOOL]), limits).tools == [TOOL]
    assert parse_chat(chat_body(tools=[TOOL], tool_choice="auto"), limits).tools == [TOOL]
    assert parse_chat(chat_body(tools=[TOOL], parallel_tool_calls=True), limits).tools == [TOOL]
    assert parse_chat(chat_body(tools=[TOOL], tool_choice="none"), limits).tools is None


def test_what_other_routers_add_means_what_we_do_anyway(limits: Limits) -> None:
    added = {"no_stop_trim": False, "skip_special_tokens": True, "continue_final_message": False}
    added |= {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    added |= {"return_hidden_states": False}
    assert parse_chat(chat_body(**added), limits) == parse_chat(chat_body(), limits)
    same = parse_completion(completion_body(**added), limits)
    assert same == parse_completion(completion_body(), limits)


def test_forms(limits: Limits) -> None:
    def form(**fields: object) -> tuple[str, str] | None:
        grammar = parse_chat(chat_body(**fields), limits).controls.grammar
        assert parse_completion(completion_body(**fields), limits).controls.grammar == grammar
        return None if grammar is None else (grammar.kind, grammar.source)

    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wrapped = {"name": "x", "schema": schema, "strict": True, "description": "d"}
    assert form(response_format={"type": "text"}) is None
    assert form(response_format={"type": "json_object"}) == (JSON_SCHEMA, '{"type": "object"}')
    asked = (JSON_SCHEMA, json.dumps(schema))
    assert form(response_format={"type": "json_schema", "json_schema": wrapped}) == asked
    assert form(structured_outputs={"json": schema}) == asked
    assert form(structured_outputs={"json": json.dumps(schema), "regex": None}) == asked
    assert form(structured_outputs={"json_object": True}) == (JSON_SCHEMA, '{"type": "object"}')
    assert form(structured_outputs={"regex": "a+"}) == (REGEX, "a+")
    assert form(structured_outputs={"grammar": "start: A"}) == (LARK, "start: A")
    choices = form(structured_outputs={"choice": ['say "hi"', "né\n"]})
    assert choices == (LARK, 'start: "say \\"hi\\"" | "né\\n"')


def test_values_that_mean_what_we_do_anyway(limits: Limits) -> None:
    same = parse_chat(chat_body(response_format={"type": "text"}, modalities=["text"]), limits)
    assert same == parse_chat(chat_body(), limits)
    same = parse_completion(completion_body(best_of=None, suffix=None), limits)
    assert same == parse_completion(completion_body(), limits)


@pytest.mark.parametrize(
    ("fields", "answers", "ranked"),
    [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"best_of": 4}, 4, True),
        ({"best_of": 3, "n": 2}, 3, True),
        ({"best_of": 2, "n": 2, "stream": True}, 2, False),
    ],
)
def test_best_of_is_how_many_are_generated(
    fields: dict, answers: int, ranked: bool, limits: Limits
) -> None:
    controls = parse_completion(completion_body(**fields), limits).controls
    assert (controls.answers, controls.ranked) == (answers, ranked)


def test_echo(limits: Limits) -> None:
    assert parse_completion(completion_body(echo=True), limits).echo is True


@pytest.mark.parametrize("text", ["\x00", "\u2028", "😀", "<|im_end|>"])
def test_any_text_is_a_text(text: str, limits: Limits) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]})
    assert parse_chat(body.encode(), limits).messages[0]["content"] == text
