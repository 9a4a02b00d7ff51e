"""P11 and O8: whatever the body, a 400 in OpenAI's shape that repeats nothing of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.errors import CoreError, UserError
from router.openai.errors import to_response
from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import Limits
from tests.router.openai.bodies import Parse, chat_body, completion_body, refused
from tests.router.openai.malformed import CANARY, MALFORMED


def outcome(parse: Parse, body: bytes, limits: Limits) -> CoreError | None:
    """The refusal, or None where the body is good. Any other exception is a failure."""
    try:
        parse(body, limits)
    except UserError as error:
        return error.error
    return None


PARSERS = pytest.mark.parametrize("parse", [parse_chat, parse_completion])
LIMITS = Limits(frozenset({"tiny"}), 2_048, 300, tool_calls=True)


@PARSERS
@pytest.mark.parametrize("name", MALFORMED)
def test_P11_malformed_body(parse: Parse, name: str, limits: Limits) -> None:
    error = refused(parse, MALFORMED[name], limits)
    assert error.status == 400
    assert CANARY not in error.message + str(error.param)
    body = json.loads(to_response(error).body)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_P11_a_good_request_still_works_afterwards(parse: Parse, limits: Limits) -> None:
    for body in MALFORMED.values():
        refused(parse, body, limits)
    good = chat_body() if parse is parse_chat else completion_body()
    assert parse(good, limits).model == "tiny"


FIELDS = [
    "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stream", "stop",
    "stream_options", "seed", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice",
    "response_format", "user", "metadata", "store", "service_tier", "modalities", "audio", "echo",
    "best_of", "suffix", "min_tokens", "stop_token_ids", "functions",
]  # fmt: skip
SECRETS = [
    CANARY,
    [CANARY],
    {CANARY: CANARY},
    [{CANARY: CANARY}],
    [{"role": CANARY, "content": CANARY}],
    [{"role": "user", "content": [{"type": CANARY, CANARY: CANARY}]}],
    [{"role": "user", "content": CANARY, CANARY: CANARY}],
    {"type": CANARY},
    [CANARY, 5],
]


@PARSERS
@pytest.mark.parametrize("field", FIELDS)
def test_O8_errors_do_not_repeat_values(parse: Parse, field: str, limits: Limits) -> None:
    body = chat_body if parse is parse_chat else completion_body
    for secret in SECRETS:
        error = outcome(parse, body(**{field: secret}), limits)
        # The name of an unknown parameter is the one thing that is echoed; values never are.
        if error is not None and error.code != "unknown_parameter":
            assert CANARY not in error.message + str(error.param)


def test_O8_numbers_are_not_repeated_when_they_could_carry_text(limits: Limits) -> None:
    secret = int.from_bytes(CANARY.encode(), "big")
    assert str(secret) not in refused(parse_chat, chat_body(n=secret), limits).message
    assert "out of range" in refused(parse_chat, chat_body(temperature=1e300), limits).message


_NAME = st.text(max_size=9)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _NAME,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAME, inner, max_size=3),
    max_leaves=8,
)


@PARSERS
@given(fields=st.dictionaries(st.sampled_from(FIELDS), _JSON, max_size=4))
def test_P11_no_value_breaks_the_parser(parse: Parse, fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", "messages": [], "prompt": "x", **fields}).encode()
    error = outcome(parse, body, LIMITS)
    assert error is None or error.status == 400


@PARSERS
@given(body=st.binary(max_size=200))
def test_P11_no_bytes_break_the_parser(parse: Parse, body: bytes) -> None:
    with pytest.raises(UserError):
        parse(body, LIMITS)
