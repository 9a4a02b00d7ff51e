"""Request bodies for tests, and what went wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from events.errors import CoreError, UserError
from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import Limits

Parse = Callable[[bytes, Limits], Any]
USER = {"role": "user", "content": "hi"}


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [USER], **fields}).encode()


def completion_body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()


BOTH = pytest.mark.parametrize(
    ("parse", "body"), [(parse_chat, chat_body), (parse_completion, completion_body)]
)
"""For what both routes have in common."""


def refused(parse: Parse, body: bytes, limits: Limits) -> CoreError:
    """The error that parsing gives; it has OpenAI's type and no status but 400 and 404."""
    with pytest.raises(UserError) as caught:
        parse(body, limits)
    error = caught.value.error
    assert error.type == "invalid_request_error"
    assert error.status in (400, 404)
    return error
