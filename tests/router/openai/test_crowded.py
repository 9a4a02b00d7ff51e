"""P11: bodies that are small in bytes and large in work, and large ones that are fine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from events.errors import UserError
from router.openai.body import MAX_DECIMALS, MAX_STRINGS, MAX_VALUES, load_object
from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import Limits
from tests.router.openai.bodies import USER, chat_body, completion_body

LIMITS = Limits(frozenset({"tiny"}), 16_400, 49_152)
BODY_BYTES = 8 * 1024 * 1024
PUNCTUATION = '"quoted" \\ [1, 2, 3], {"a": 0.5}, \\" e, \\\\'


def listed(value: bytes, count: int) -> bytes:
    return b'{"prompt": [' + b",".join([value] * count) + b"]}"


CROWDED = {
    "keys": b"{" + b",".join(b'"%x":1' % n for n in range(700_000)) + b"}",
    "integers": listed(b"12", 2_500_000),
    "decimals": listed(b"0.5", 2_000_000),
    "exponents": listed(b"1e5", 2_000_000),
    "strings": listed(b'""', 2_500_000),
    "objects": listed(b"{}", 2_500_000),
    "arrays": listed(b"[]", 2_500_000),
    "constants": listed(b"true", 1_500_000),
    "open arrays": b'{"prompt": ' + b"[" * 5_000_000,
    "cut off": listed(b"12", 2_500_000)[:-2],
}


@pytest.mark.parametrize("name", CROWDED)
def test_P11_a_body_that_costs_too_much_to_parse_is_413(name: str) -> None:
    assert len(CROWDED[name]) <= BODY_BYTES
    for parse in (parse_chat, parse_completion):
        with pytest.raises(UserError) as caught:
            parse(CROWDED[name], LIMITS)
        assert caught.value.error.status == 413
        assert caught.value.error.code == "request_too_large"


def test_the_bounds_are_exact_whatever_the_strings_say() -> None:
    for value, count, limit in (
        (PUNCTUATION, MAX_STRINGS - 1, MAX_STRINGS - 1),
        (0.5, MAX_DECIMALS, MAX_DECIMALS),
        (12, MAX_VALUES - 1, MAX_VALUES - 1),
    ):
        assert len(load_object(json.dumps({"p": [value] * count}).encode())["p"]) == limit
        with pytest.raises(UserError):
            load_object(json.dumps({"p": [value] * (count + 2)}).encode())


def test_P11_tools_are_bounded_in_all() -> None:
    def chat(entries: int) -> bytes:
        function = {"name": "f", "parameters": {"enum": list(range(entries))}}
        return chat_body(tools=[{"type": "function", "function": function}] * 4)

    assert len(parse_chat(chat(8_000), LIMITS).tools or ()) == 4
    with pytest.raises(UserError) as caught:
        parse_chat(chat(9_000), LIMITS)
    assert (caught.value.error.status, caught.value.error.param) == (400, "tools")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": PUNCTUATION * 150_000}]},
        {"messages": [USER] * 2_048},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1_024}] * 8},
    ],
)
def test_large_chats_are_read(fields: dict[str, Any]) -> None:
    body = chat_body(**fields)
    assert len(body) <= BODY_BYTES
    assert len(parse_chat(body, LIMITS).messages) == len(fields["messages"])


def test_as_many_token_ids_as_prompts_can_have_are_read() -> None:
    body = completion_body(prompt=[[40_000] * 10_000] * 32)
    asked = parse_completion(body, LIMITS)
    assert [len(prompt) for prompt in asked.prompts] == [40_000] * 32
