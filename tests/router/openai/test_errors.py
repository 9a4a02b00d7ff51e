"""CoreErrors as HTTP answers."""

from __future__ import annotations

import json

import pytest

from events.errors import CoreError
from router.openai.errors import SERVER_ERROR, error_body, to_response


def test_P15_shape() -> None:
    error = CoreError(status=400, message='a "b"\n', param="n", code="c")
    response = to_response(error)
    assert (response.status, response.headers) == (400, {"Content-Type": "application/json"})
    assert json.loads(response.body) == {
        "error": {"message": 'a "b"\n', "type": "invalid_request_error", "param": "n", "code": "c"}
    }


def test_absent_param_and_code_are_null() -> None:
    error = json.loads(error_body(SERVER_ERROR))["error"]
    assert (error["param"], error["code"], error["type"]) == (None, None, "server_error")


@pytest.mark.parametrize(
    ("status", "wait_s", "header"),
    [
        (429, 0.2, "1"),
        (429, 2.1, "3"),
        (429, float("inf"), "1"),
        (503, None, "1"),
        (503, 1e3, "1000"),
        (504, 2.0, "2"),
        (500, None, None),
        (400, None, None),
    ],
)
def test_O3_retry_after_is_a_whole_number_of_seconds(
    status: int, wait_s: float | None, header: str | None
) -> None:
    error = CoreError(status=status, message="m", retry_after_s=wait_s)
    assert to_response(error).headers.get("Retry-After") == header
