"""The bodies of the two generating routes: bytes to a typed request, or OpenAI's 400 and 404."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from events.grammar import Grammar
from router.openai import faults
from router.openai.body import load_object
from router.openai.fields import walk
from router.openai.parameters import chat_table, completion_table
from router.openai.plain import read_plain
from router.openai.schema import ChatRequest, CompletionRequest, Controls, Limits
from router.openai.tools.choice import Calls, ToolChoice, calls_grammar

_CONTROLS = frozenset(Controls.__struct_fields__)


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


def _take_controls(values: dict[str, Any], grammar: Grammar | None) -> Controls:
    controls = {name: values.pop(name) for name in list(values) if name in _CONTROLS}
    result = Controls(grammar=grammar, **controls)
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


def _take_form(values: dict[str, Any]) -> Grammar | None:
    """The form that the whole answer has to have."""
    form, outputs = values.pop("response_format", None), values.pop("structured_outputs", None)
    if form is not None and outputs is not None:
        raise faults.refusal(
            "Setting 'response_format' and 'structured_outputs' at the same time is not supported.",
            param="structured_outputs",
            code="invalid_parameter_combination",
        )
    found: Grammar | None = form or outputs
    return found


def _take_tools(
    values: dict[str, Any], limits: Limits, answer: Grammar | None
) -> tuple[str, Grammar | None]:
    """Leaves the tools that the model is shown and what to look for in its answer; returns what
    the answer may be, and the parameter that demands it. "none" leaves the tools out on purpose."""
    choice: ToolChoice | None = values.pop("tool_choice", None)
    parallel = values.pop("parallel_tool_calls", None)
    if "tools" not in values:
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None:
                why = f"'{name}' is only allowed when 'tools' are specified"
                raise faults.invalid_value(name, why)
        return _param(answer), answer
    tools = values["tools"]
    strict = [tool["function"].pop("strict", False) for tool in tools]
    choice = choice or ToolChoice("auto")
    if choice.mode == "none":
        del values["tools"]
        return _param(answer), answer
    names = frozenset(tool["function"]["name"] for tool in tools)
    values["calls"] = Calls(limits.tool_format, names)
    if not (choice.forced or any(strict) or parallel is False or answer is not None):
        return "", None
    single = parallel is False
    param = "tool_choice" if choice.forced else "parallel_tool_calls" if single else "tools"
    return param, calls_grammar(limits.tool_format, tools, choice, not single, answer)


def _param(answer: Grammar | None) -> str:
    return "" if answer is None else answer.param


def _check_form(param: str, grammar: Grammar | None, limits: Limits) -> None:
    """A form that nobody enforces would be a lie."""
    if grammar is not None and not limits.grammars:
        raise faults.unsupported_value(param, "can't be enforced by the servers of this model")


def parse_chat(body: bytes, limits: Limits) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises UserError."""
    return read_plain(body, limits) or read_chat(load_object(body), limits)


def read_chat(document: Mapping[str, Any], limits: Limits) -> ChatRequest:
    """The same body, loaded. Raises UserError."""
    _check_model(document, limits)
    values = walk(document, chat_table(limits))
    _take_stream(values)
    _take_answer_length(values)
    _take_chat_logprobs(values)
    param, grammar = _take_tools(values, limits, _take_form(values))
    _check_form(param, grammar, limits)
    return ChatRequest(controls=_take_controls(values, grammar), **values)


def _check_completion(request: CompletionRequest, limits: Limits) -> None:
    controls = request.controls
    if controls.answers < controls.n:
        raise faults.invalid_value("best_of", "less than 'n'")
    if controls.ranked and request.stream:
        raise faults.refusal(
            "Streaming is not supported when 'best_of' is above 'n': answers are ranked when all of"
            " them are complete.",
            param="best_of",
            code="invalid_parameter_combination",
        )
    if len(request.prompts) * controls.answers > limits.max_choices:
        param = "best_of" if controls.ranked else "n"
        raise faults.invalid_value(param, f"more than {limits.max_choices} choices in all")
    if controls.max_tokens == 0:
        raise faults.unsupported_value("max_tokens", "must be at least 1")


def parse_completion(body: bytes, limits: Limits) -> CompletionRequest:
    """The body of POST /v1/completions. Raises UserError."""
    return read_completion(load_object(body), limits)


def read_completion(document: Mapping[str, Any], limits: Limits) -> CompletionRequest:
    """The same body, loaded. Raises UserError."""
    _check_model(document, limits)
    values = walk(document, completion_table(limits))
    _take_stream(values)
    grammar = _take_form(values)
    _check_form(_param(grammar), grammar, limits)
    request = CompletionRequest(controls=_take_controls(values, grammar), **values)
    _check_completion(request, limits)
    return request
