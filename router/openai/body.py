"""Bytes of a request body to a JSON object, strictly.

Refused beyond plain syntax errors: anything but an object, NaN and Infinity, numbers out of range,
bad UTF-8, unpaired surrogates, a name given twice, nesting beyond reason, and more values than any
request needs: the parser holds the event loop, so its work is bounded before it begins.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from router.openai import faults
from router.openai.quotes import quotes_in

SMALL_BYTES = 128 * 1024
"""A body up to this size can't hold enough values to matter: each of them takes its bytes."""
TEXT_BYTES = 4 * 1024
"""From this size on it pays to let the quicker parser try first."""
MAX_STRINGS = 65_536
MAX_DECIMALS = 65_536
MAX_VALUES = 327_680
"""Of all kinds: enough for 32 prompts of 10,000 token ids."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _RejectedError(ValueError):
    """A reason in our own words; the parser's own text may quote the body."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _RejectedError("an object holds the same name twice")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RejectedError("a number is out of range")
    return value


def _constant(_: str) -> float:
    raise _RejectedError("NaN and Infinity are not JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_constant=_constant
)


def _check_work(body: bytes) -> None:
    """Count what lies outside of strings. Counts are exact as far as the body is valid JSON, and
    it isn't parsed any further."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = bare.count(b'"')
    if quotes > 2 * MAX_STRINGS:
        raise faults.crowded_body("names and strings", MAX_STRINGS)
    structure = b"".join(bare.split(b'"')[::2])
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise faults.crowded_body("values", MAX_VALUES)
    if sum(map(structure.count, (b".", b"e", b"E"))) > MAX_DECIMALS:
        raise faults.crowded_body("decimals and constants", MAX_DECIMALS)


def _decode(body: bytes) -> Any:
    value = _decoder.decode(body.decode())
    if _SURROGATE_ESCAPE.search(body):
        # The standard parser lets half a surrogate pair through; this one doesn't.
        msgspec.json.decode(body)
    return value


def _strings(value: Any) -> int:
    """How many strings it holds, names included."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        return len(value) + sum(map(_strings, value.values()))
    return sum(map(_strings, value)) if isinstance(value, list) else 0


def _quick(body: bytes) -> dict[str, Any] | None:
    """The object, by a parser that is as strict but for names given twice: those show as strings
    that got lost. None for whatever it refuses; the other parser says why."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(value, dict) and 2 * _strings(value) == quotes_in()(body):
        return value
    return None


def load_object(body: bytes) -> dict[str, Any]:
    """The body as a dict. Raises UserError (400, 413) whose text never quotes the body."""
    if len(body) > SMALL_BYTES:
        _check_work(body)
    if len(body) > TEXT_BYTES and (found := _quick(body)) is not None:
        return found
    try:
        value = _decode(body)
    except _RejectedError as error:
        raise faults.malformed_json(str(error)) from None
    except UnicodeDecodeError:
        raise faults.malformed_json("it is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise faults.malformed_json(f"invalid JSON at {place}") from None
    except RecursionError:
        raise faults.malformed_json("it is nested too deeply") from None
    except (ValueError, msgspec.MsgspecError):
        raise faults.malformed_json("a string or number in it is invalid") from None
    if not isinstance(value, dict):
        raise faults.malformed_json("expected a JSON object")
    return value
