"""Bad requests: OpenAI's status, type, code, param and wording."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import Limits
from tests.router.openai.bodies import BOTH, USER, Parse, chat_body, completion_body, refused

MISSING = "missing_required_parameter"
UNSUPPORTED = "unsupported_parameter"
EMPTY = "empty array. Expected an array with minimum length 1, but got an empty array instead."
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF_CALL = {**CALL, "function": {"name": "f"}}
TOOL = {"type": "function", "function": {"name": "look"}}
STRICT_TOOL = {"type": "function", "function": {"name": "look", "strict": True}}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
ENDLESS_TOOL = {"type": "function", "function": {"name": "look", "parameters": ENDLESS}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def message(role: str, **fields: Any) -> list:
    return [{"role": role, **fields}]


def user(content: Any, **more: Any) -> list:
    return [{"role": "user", "content": content, **more}]


BOTH_ROUTES = [
    ("temperature", -0.5, "decimal_below_min_value"),
    ("temperature", 3, "decimal_above_max_value"),
    ("temperature", "1", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("top_p", 1.01, "decimal_above_max_value"),
    ("min_p", -1, "decimal_below_min_value"),
    ("top_k", -2, "integer_below_min_value"),
    ("top_k", 1.5, "invalid_type"),
    ("n", 0, "integer_below_min_value"),
    ("n", 9, "integer_above_max_value"),
    ("n", 10**30, "integer_above_max_value"),
    ("n", "2", "invalid_type"),
    ("max_tokens", -1, "integer_below_min_value"),
    ("max_tokens", 2**31, "integer_above_max_value"),
    ("max_tokens", [], "invalid_type"),
    ("seed", 2**63, "integer_above_max_value"),
    ("presence_penalty", 2.1, "decimal_above_max_value"),
    ("frequency_penalty", -2.1, "decimal_below_min_value"),
    ("repetition_penalty", 0, "decimal_below_min_value"),
    ("logit_bias", [], "invalid_type"),
    ("logit_bias", {"a": 1}, "invalid_value"),
    ("logit_bias", {"-1": 1}, "invalid_value"),
    ("logit_bias", {"999999": 1}, "invalid_value"),
    ("logit_bias", {"1": 101}, "decimal_above_max_value"),
    ("logit_bias", {"1": None}, "invalid_type"),
    ("logit_bias", {str(i): 0 for i in range(1_025)}, "invalid_value"),
    ("stop", ["a"] * 5, "array_above_max_length"),
    ("bad_words", "no", "invalid_type"),
    ("bad_words", [" "], "invalid_value"),
    ("bad_words", ["a"] * 257, "array_above_max_length"),
    ("stop", "", "empty_string"),
    ("stop", "x" * 257, "string_above_max_length"),
    ("stop", 5, "invalid_type"),
    ("stream", "true", "invalid_type"),
    ("ignore_eos", 1, "invalid_type"),
    ("min_tokens", -1, "integer_below_min_value"),
    ("user", 5, "invalid_type"),
    ("user", "x" * 513, "string_above_max_length"),
    ("metadata", {str(i): "" for i in range(17)}, "invalid_value"),
    ("metadata", {"a": 1}, "invalid_type"),
    ("service_tier", "golden", "invalid_value"),
    ("prompt_template", "x", "unknown_parameter"),
]


@BOTH
@pytest.mark.parametrize(("name", "value", "code"), BOTH_ROUTES)
def test_one_bad_parameter(
    parse: Parse, body: Any, name: str, value: Any, code: str, limits: Limits
) -> None:
    error = refused(parse, body(**{name: value}), limits)
    assert (error.status, error.code, error.param) == (400, code, name)


def test_a_seed_out_of_range_is_told_the_real_bound(limits: Limits) -> None:
    error = refused(parse_chat, chat_body(seed=2**70), limits)
    assert error.code == "integer_above_max_value"
    assert f"<= {2**63 - 1}," in error.message
    assert str(2**70) not in error.message


CHAT = [
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": [USER] * 2_049}, "messages", "array_above_max_length"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{}]}, "messages[0].role", MISSING),
    ({"messages": [{"role": "user"}]}, "messages[0].content", MISSING),
    ({"messages": message("assistant")}, "messages[0].content", "invalid_type"),
    ({"messages": [{**USER, "role": "root"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{**USER, "role": 1}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{**USER, "role": "function"}]}, "messages[0].role", "invalid_value"),
    ({"messages": user(None)}, "messages[0].content", "invalid_type"),
    ({"messages": user(5)}, "messages[0].content", "invalid_type"),
    ({"messages": user([])}, "messages[0].content", "empty_array"),
    ({"messages": user(["hi"])}, "messages[0].content[0]", "invalid_type"),
    ({"messages": user([{}])}, "messages[0].content[0].type", "invalid_type"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", MISSING),
    ({"messages": user("x", tool_calls=[CALL])}, "messages[0].tool_calls", "unknown_parameter"),
    ({"messages": user("x", name="n" * 65)}, "messages[0].name", "string_above_max_length"),
    ({"messages": message("tool", content="x")}, "messages[0].tool_call_id", MISSING),
    ({"messages": message("assistant", tool_calls=[])}, "messages[0].tool_calls", "empty_array"),
    ({"messages": message("assistant", tool_calls=[HALF_CALL])},
     "messages[0].tool_calls[0].function.arguments", MISSING),
    ({"messages": message("assistant", refusal="no")}, "messages[0].refusal", UNSUPPORTED),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_parameter_combination"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "integer_above_max_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
    ({"tools": []}, "tools", "empty_array"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": 1}, "tool_choice", "invalid_type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", MISSING),
    ({"tools": [TOOL], "tool_choice": named("x")}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "parallel_tool_calls": 0}, "parallel_tool_calls", "invalid_type"),
    ({"tools": [ENDLESS_TOOL], "tool_choice": "required"}, "tools", "invalid_value"),
    ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
     "invalid_value"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_value"),
    ({"no_stop_trim": True}, "no_stop_trim", "unsupported_value"),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"prediction": {}}, "prediction", UNSUPPORTED),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), CHAT)
def test_bad_chat_request(fields: dict, param: str, code: str, limits: Limits) -> None:
    error = refused(parse_chat, chat_body(**fields), limits)
    assert (error.status, error.code, error.param) == (400, code, param)


COMPLETION = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
    ({"prompt": [10**6]}, "prompt[0]", "integer_above_max_value"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": ["a"] * 33}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * 32, "n": 8}, "n", "invalid_value"),
    ({"prompt": [1] * 2_048}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", "unsupported_value"),
    ({"logprobs": 6}, "logprobs", "integer_above_max_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"best_of": 0}, "best_of", "integer_below_min_value"),
    ({"best_of": 9}, "best_of", "integer_above_max_value"),
    ({"best_of": 2.5}, "best_of", "invalid_type"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"prompt": ["a"] * 32, "best_of": 3}, "best_of", "invalid_value"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", "invalid_parameter_combination"),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"top_logprobs": 1}, "top_logprobs", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), COMPLETION)
def test_bad_completion_request(fields: dict, param: str, code: str, limits: Limits) -> None:
    error = refused(parse_completion, completion_body(**fields), limits)
    assert (error.status, error.code, error.param) == (400, code, param)


def test_P15_empty_messages(limits: Limits) -> None:
    error = refused(parse_chat, chat_body(messages=[]), limits)
    assert (error.status, error.code, error.param) == (400, "empty_array", "messages")
    assert error.message == f"Invalid 'messages': {EMPTY}"


@BOTH
def test_P15_unknown_model(parse: Parse, body: Any, limits: Limits) -> None:
    error = refused(parse, body(model="gpt-4.1-nano-wrong", temperature=9), limits)
    assert (error.status, error.code, error.param) == (404, "model_not_found", None)
    assert error.message == (
        "The model `gpt-4.1-nano-wrong` does not exist or you do not have access to it."
    )


def test_the_name_of_an_unknown_model_is_cut(limits: Limits) -> None:
    error = refused(parse_chat, chat_body(model="x\n" * 500), limits)
    assert len(error.message) < 150
    assert error.message.isprintable()


def test_P15_the_first_mistake_in_the_clients_order_is_named(limits: Limits) -> None:
    body = b'{"max_tokens": -1, "model": "tiny", "prompt": "", "temperature": 3}'
    error = refused(parse_completion, body, limits)
    assert (error.code, error.param) == ("integer_below_min_value", "max_tokens")
    assert error.message == (
        "Invalid 'max_tokens': integer below minimum value. "
        "Expected a value >= 0, but got -1 instead."
    )


def test_wording_of_decimals_and_types(limits: Limits) -> None:
    assert refused(parse_chat, chat_body(temperature=3), limits).message == (
        "Invalid 'temperature': decimal above maximum value. "
        "Expected a value <= 2, but got 3 instead."
    )
    assert refused(parse_chat, chat_body(n="x"), limits).message == (
        "Invalid type for 'n': expected an integer, but got a string instead."
    )


@pytest.mark.parametrize("missing", ["model", "messages", "prompt"])
def test_missing_required_parameter(missing: str, limits: Limits) -> None:
    parse = parse_completion if missing == "prompt" else parse_chat
    body = b'{"model": "tiny"}' if missing != "model" else b"{}"
    error = refused(parse, body, limits)
    assert (error.status, error.code) == (400, MISSING)
    assert (error.param, error.message) == (missing, f"Missing required parameter: '{missing}'.")


@BOTH
@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
@pytest.mark.parametrize("stream", [None, False])
def test_P1_stream_options_without_stream(
    parse: Parse, body: Any, options: dict, stream: bool | None, limits: Limits
) -> None:
    error = refused(parse, body(stream=stream, stream_options=options), limits)
    assert error.param == "stream_options"
    assert "only allowed when 'stream' is enabled" in error.message


@BOTH
@pytest.mark.parametrize(
    ("options", "param"),
    [
        (True, "stream_options"),
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"other": 1}, "stream_options.other"),
    ],
)
def test_P1_bad_stream_options(
    parse: Parse, body: Any, options: Any, param: str, limits: Limits
) -> None:
    error = refused(parse, body(stream=True, stream_options=options), limits)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_P10_bad_logprobs(fields: dict, param: str, limits: Limits) -> None:
    assert refused(parse_chat, chat_body(**fields), limits).param == param


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_object", "json_schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": "object"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 2**20]}}},
        {"type": "grammar"},
        {},
        "text",
        {"type": "text", "more": 1},
    ],
)
def test_P12_response_format_is_never_ignored(format_: Any, limits: Limits) -> None:
    error = refused(parse_chat, chat_body(response_format=format_), limits)
    assert error.status == 400
    assert error.param.startswith("response_format")


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": 5},
        {"regex": ""},
        {"regex": ["a"]},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["a"] * 1_025},
        {"json_object": False},
        {"grammar": {}},
        {"structural_tag": "x"},
        {"regex": "a", "whitespace_pattern": "x"},
        "json",
    ],
)
@pytest.mark.parametrize(
    ("parse", "make"), [(parse_chat, chat_body), (parse_completion, completion_body)]
)
def test_P12_structured_outputs_are_checked(
    parse: Parse, make: Any, outputs: Any, limits: Limits
) -> None:
    error = refused(parse, make(structured_outputs=outputs), limits)
    assert error.param.startswith("structured_outputs")


def test_P12_one_form_at_a_time(limits: Limits) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert refused(parse_chat, chat_body(**both), limits).code == "invalid_parameter_combination"
    assert refused(parse_chat, chat_body(guided_json={}), limits).code == UNSUPPORTED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"tools": [STRICT_TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("look")}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_P12_without_a_server_that_enforces_it_no_form_is_promised(
    fields: dict, param: str, limits: Limits
) -> None:
    free = structs.replace(limits, grammars=False)
    error = refused(parse_chat, chat_body(**fields), free)
    assert (error.code, error.param) == ("unsupported_value", param)
    assert parse_chat(chat_body(**fields), limits).controls.grammar is not None
    parse_chat(chat_body(tools=[TOOL], response_format={"type": "text"}), free)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_P14_parts_that_are_not_text(role: str, kind: str, limits: Limits) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "http://x"}}]
    body = chat_body(messages=[{"role": role, "content": content}])
    error = refused(parse_chat, body, limits)
    assert (error.code, error.param) == ("unsupported_value", "messages[0].content[1].type")
    assert "reads text only" in error.message


def test_past_calls_that_the_template_would_not_show(limits: Limits) -> None:
    blind = structs.replace(limits, tool_calls=False)
    history = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    error = refused(parse_chat, chat_body(messages=history), blind)
    assert (error.code, error.param) == (UNSUPPORTED, "messages[1].tool_calls")


def test_a_tool_schema_nested_without_end(limits: Limits) -> None:
    schema: dict = {}
    for _ in range(40):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = refused(parse_chat, chat_body(tools=[tool]), limits)
    assert error.param == "tools[0].function.parameters"
