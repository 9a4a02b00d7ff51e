"""The count of strings in a JSON text: native, its twin, and what the text really holds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.openai.quotes import native_quotes, python_quotes

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\/\n\u00e9', max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\', max_size=3), inner),
    max_leaves=12,
)


def _strings(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_strings, value.values()))
    if isinstance(value, list):
        return sum(map(_strings, value))
    return int(isinstance(value, str))


@given(values, st.booleans())
@settings(deadline=None)
def test_both_find_two_for_each_string(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert native_quotes()(body) == python_quotes(body) == 2 * _strings(value)


@given(st.binary(max_size=30) | st.text(alphabet='"\\a', max_size=30).map(str.encode))
@example(b"")
@example(b'\\"')
@example(b'"\0"')
@settings(deadline=None)
def test_both_say_the_same_of_anything(body: bytes) -> None:
    assert native_quotes()(body) == python_quotes(body)
