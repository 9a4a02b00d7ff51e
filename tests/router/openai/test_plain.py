"""The quick reading of the usual chat request gives what the readers give, or leaves it to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.errors import UserError
from router.openai.body import load_object
from router.openai.parse import parse_chat, read_chat
from router.openai.plain import read_plain
from router.openai.schema import ChatRequest, Limits

LIMITS = Limits(models=frozenset(["tiny", 'ti"ny']), context_tokens=512, vocab=300, max_messages=3)
TEXTS = st.text(max_size=12) | st.sampled_from(["", '"', "\\", '\\"', '"a"', "\\\\", "é\n\t☃"])
ROLES = st.sampled_from(["system", "user", "assistant", "developer", "tool", "x"])
ODD = st.sampled_from([None, True, 0, 1, -1, 1.0, 2.5, 1e400, "1", [], {}, 2**31, 2**63, 2**70])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS | ODD}, optional={"name": TEXTS, "refusal": st.none()}
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["tiny", 'ti"ny', "nobody", 1]),
        "messages": st.lists(MESSAGE, max_size=4) | ODD,
        "stream": st.booleans() | ODD,
        "stream_options": st.sampled_from(
            [{"include_usage": True}, {"include_usage": False}, {}, {"x": 1}, None]
        ),
        "max_tokens": st.integers(0, 9) | ODD,
        "max_completion_tokens": st.integers(0, 9) | ODD,
        "temperature": st.floats(-1, 3) | st.integers(-1, 3) | ODD,
        "top_p": st.floats(-1, 2) | ODD,
        "seed": st.integers(-(2**64), 2**64) | ODD,
        "n": st.integers(0, 3),
        "user": TEXTS,
    },
)


def told(read: Any, *given_: Any) -> Any:
    """What is read, or what is refused and how."""
    try:
        return read(*given_)
    except UserError as error:
        return error.error


def slowly(body: bytes) -> Any:
    return told(lambda: read_chat(load_object(body), LIMITS))


@settings(max_examples=400, deadline=None)
@given(document=BODY, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_both_read_the_same(document: dict, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    assert told(parse_chat, body, LIMITS) == slowly(body)
    found = read_plain(body, LIMITS)
    assert found is None or found == slowly(body)


PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"a \\"b\\" \\\\"}]'


@pytest.mark.parametrize(
    "more",
    [
        b"",
        b',"stream":true,"stream_options":{"include_usage":true}',
        b',"max_tokens":4,"temperature":0,"top_p":0.5,"seed":-3,"stream":false',
        b',"max_completion_tokens":7',
    ],
)
def test_the_usual_request_is_read_quickly(more: bytes) -> None:
    found = read_plain(PLAIN + more + b"}", LIMITS)
    assert isinstance(found, ChatRequest)
    assert found == slowly(PLAIN + more + b"}")


@pytest.mark.parametrize(
    "more",
    [
        b',"model":"tiny"',
        b',"max_tokens":4,"max_tokens":4',
        b',"stream":true,"stream_options":{"include_usage":true,"include_usage":true}',
        b',"stop":"x"',
        b',"max_tokens":1,"max_completion_tokens":1',
        b',"temperature":1e999',
        b',"seed":NaN',
        b',"max_tokens":null',
        b'} ["x"]',
    ],
)
def test_P11_what_is_not_quite_so_is_left_to_the_readers(more: bytes) -> None:
    body = PLAIN + more + b"}"
    assert read_plain(body, LIMITS) is None
    assert told(parse_chat, body, LIMITS) == slowly(body)


def test_P11_a_name_given_twice_in_a_message_is_refused() -> None:
    body = PLAIN.replace(b'"role":"user"', b'"role":"user","role":"user"') + b"}"
    assert read_plain(body, LIMITS) is None
    assert told(parse_chat, body, LIMITS).status == 400


def test_P11_bad_text_is_left_to_the_readers() -> None:
    for bad in (b"\xff", b"\\ud800", b"\n", b"\x00", b"\\x"):
        body = PLAIN.replace(b"a ", b"a " + bad) + b"}"
        assert read_plain(body, LIMITS) is None, bad
        assert told(parse_chat, body, LIMITS).status == 400
