"""Strict JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.errors import UserError
from router.openai import body as body_module
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


def loaded(body: bytes) -> Any:
    """What it is read as, or the refusal."""
    try:
        return load_object(body)
    except UserError as error:
        return error.error


def loaded_slowly(body: bytes) -> Any:
    """The same without the quicker parser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "TEXT_BYTES", 1 << 40)
        return loaded(body)


PADDING = b" " * body_module.TEXT_BYTES
NAMES = st.sampled_from(["a", 'b"', "c\\", "\\\\", '\\"'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner),
    max_leaves=12,
)
SCRAPS = [b'{"a":', b'"a"', rb'"b\""', rb'"\\"', *(bytes([each]) for each in rb":,{}[]1\"")]


@given(value=st.dictionaries(NAMES, VALUES), ascii_only=st.booleans())
def test_P11_long_bodies_are_read_as_short_ones_are(value: dict, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass") + PADDING
    assert repr(loaded(body)) == repr(loaded_slowly(body))


@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=16))
def test_P11_long_bodies_are_refused_as_short_ones_are(scraps: list[bytes]) -> None:
    body = b'{"a":' + b"".join(scraps) + b"}" + PADDING
    assert loaded(body) == loaded_slowly(body)


def test_the_quicker_parser_reads_what_is_plain_and_no_name_given_twice() -> None:
    assert body_module._quick(rb'{"a": "\\", "b": ["\"", {"\\\"": 1.5}]}') is not None
    assert body_module._quick(b'{"a": {"b": 1, "b": 2}}') is None
    assert body_module._quick(b'{"a": "x", "a": "x"}') is None
