"""Strict JSON."""

from __future__ import annotations

import pytest

from events.errors import UserError
from router.openai.body import load_object


def test_an_object_is_loaded() -> None:
    body = '{"a": [1, 2.5, "é \\ud83d\\ude00", null, true], "b": {"a": -0}}'.encode()
    assert load_object(body) == {"a": [1, 2.5, "é 😀", None, True], "b": {"a": 0}}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "line 1, column 1"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1} x', "line 1, column 10"),
        (b"[]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'{"a": NaN}', "NaN and Infinity are not JSON"),
        (b'{"a": -Infinity}', "NaN and Infinity are not JSON"),
        (b'{"a": 1e999}', "a number is out of range"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "a string or number in it is invalid"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "line 1, column 1"),
        (b'{"a": "\\ud83d"}', "a string or number in it is invalid"),
        (b'{"a": "\\ude00\\ud83d"}', "a string or number in it is invalid"),
        (b'{"a": "\x01"}', "line 1"),
        (b'{"a": 1, "a": 2}', "the same name twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the same name twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 50_000, "nested too deeply"),
    ],
)
def test_P11_what_is_not_strict_json(body: bytes, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        load_object(body)
    error = caught.value.error
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.message.startswith("We could not parse the JSON body of your request: ")
    assert reason in error.message
