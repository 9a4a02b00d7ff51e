"""A client's mistakes, each in OpenAI's words: type, code, param and message.

The texts name fields and small numbers only; they never quote a value of the body. The one
exception is the model's name, cut short, because OpenAI echoes it too.
"""

from __future__ import annotations

import math
import re
from typing import Any

from events.errors import CoreError, UserError

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MODEL_ECHO_CHARS = 64
_LARGEST_ECHOED = 10**12


def refusal(
    message: str, *, param: str | None = None, code: str | None = None, status: int = 400
) -> UserError:
    """A UserError of type invalid_request_error."""
    return UserError(CoreError(status=status, message=message, param=param, code=code))


def _kind(value: Any) -> str:
    """What JSON calls the value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _number(value: float) -> str:
    """A small number as text; a large one only by its kind, so that nothing is smuggled."""
    if not math.isfinite(value) or abs(value) > _LARGEST_ECHOED:
        return "a number out of range"
    return str(value) if isinstance(value, int) else f"{value:g}"


def _bound(value: float) -> str:
    """One of our own limits, however large."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def malformed_json(reason: str) -> UserError:
    """The body is no JSON object that we accept; `reason` is one of our own words."""
    return refusal(f"We could not parse the JSON body of your request: {reason}.")


def crowded_body(what: str, maximum: int) -> UserError:
    """413: the body would cost too much to read, however few bytes it has."""
    return refusal(
        f"The request's body is too large: it holds more than {maximum} {what}.",
        code="request_too_large",
        status=413,
    )


def missing(param: str) -> UserError:
    """A required parameter is absent."""
    return refusal(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def unknown(path: str, name: str) -> UserError:
    """A parameter that the API does not have. `path` is where it lies ("" at the top)."""
    safe = name if _SAFE_NAME.fullmatch(name) else "?"
    param = f"{path}.{safe}" if path else safe
    return refusal(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")


def unsupported(param: str, why: str = "is not supported with this model") -> UserError:
    """A parameter of the API that this server doesn't implement."""
    return refusal(
        f"Unsupported parameter: '{param}' {why}.", param=param, code="unsupported_parameter"
    )


def unsupported_value(param: str, why: str) -> UserError:
    """A parameter that we know with a value that we don't implement."""
    return refusal(f"Unsupported value: '{param}' {why}.", param=param, code="unsupported_value")


def invalid_type(param: str, expected: str, value: Any) -> UserError:
    """`expected` carries its article: "an integer"."""
    return refusal(
        f"Invalid type for '{param}': expected {expected}, but got {_kind(value)} instead.",
        param=param,
        code="invalid_type",
    )


def invalid_value(param: str, why: str) -> UserError:
    """The right type with a value that makes no sense."""
    return refusal(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


def not_one_of(param: str, allowed: tuple[str, ...]) -> UserError:
    """A string outside its enumeration."""
    names = [f"'{name}'" for name in allowed]
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + f", and {names[-1]}"
    return refusal(
        f"Invalid value for '{param}'. Supported values are: {listed}.",
        param=param,
        code="invalid_value",
    )


def below_min(param: str, kind: str, minimum: float, value: float) -> UserError:
    """kind: "integer" or "decimal"."""
    return refusal(
        f"Invalid '{param}': {kind} below minimum value. "
        f"Expected a value >= {_bound(minimum)}, but got {_number(value)} instead.",
        param=param,
        code=f"{kind}_below_min_value",
    )


def above_max(param: str, kind: str, maximum: float, value: float) -> UserError:
    """kind: "integer" or "decimal"."""
    return refusal(
        f"Invalid '{param}': {kind} above maximum value. "
        f"Expected a value <= {_bound(maximum)}, but got {_number(value)} instead.",
        param=param,
        code=f"{kind}_above_max_value",
    )


def empty_array(param: str) -> UserError:
    """An array that needs at least one entry."""
    return refusal(
        f"Invalid '{param}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        param=param,
        code="empty_array",
    )


def long_array(param: str, maximum: int, length: int) -> UserError:
    """An array with too many entries."""
    return refusal(
        f"Invalid '{param}': array too long. Expected an array with maximum length {maximum}, "
        f"but got an array with length {length} instead.",
        param=param,
        code="array_above_max_length",
    )


def empty_string(param: str) -> UserError:
    """A string that needs at least one character."""
    return refusal(
        f"Invalid '{param}': empty string. Expected a string with minimum length 1, "
        "but got an empty string instead.",
        param=param,
        code="empty_string",
    )


def long_string(param: str, maximum: int, length: int) -> UserError:
    """A string with too many characters."""
    return refusal(
        f"Invalid '{param}': string too long. Expected a string with maximum length {maximum}, "
        f"but got a string with length {length} instead.",
        param=param,
        code="string_above_max_length",
    )


def model_not_found(name: str) -> UserError:
    """404, with the name as OpenAI echoes it, but cut and without control characters."""
    shown = "".join(c if c.isprintable() else "?" for c in name[:_MODEL_ECHO_CHARS])
    return refusal(
        f"The model `{shown}` does not exist or you do not have access to it.",
        code="model_not_found",
        status=404,
    )


def prompt_too_long(
    param: str, context_tokens: int, prompt_tokens: int, *, at_least: bool = False
) -> UserError:
    """The prompt alone leaves no room for an answer. `at_least`: the count is a lower bound."""
    noun = "messages" if param == "messages" else "prompt"
    count = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    return refusal(
        f"This model's maximum context length is {context_tokens} tokens. However, your {noun} "
        f"resulted in {count} tokens. Please reduce the length of the {noun}.",
        param=param,
        code="context_length_exceeded",
    )


def answer_too_long(
    param: str, context_tokens: int, prompt_tokens: int, answer_tokens: int
) -> UserError:
    """Prompt and the asked answer together don't fit."""
    noun = "messages" if param == "messages" else "prompt"
    return refusal(
        f"This model's maximum context length is {context_tokens} tokens. However, you requested "
        f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the {noun}, {answer_tokens} "
        f"in the completion). Please reduce the length of the {noun} or completion.",
        param=param,
        code="context_length_exceeded",
    )
