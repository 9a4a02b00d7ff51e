"""CoreErrors as HTTP answers."""

from __future__ import annotations

import json

import pytest

from events.errors import CoreError
from router.openai.errors import RETRY_MS, SERVER_ERROR, error_body, to_response


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
    ("status", "wait_s", "seconds"),
    [
        (429, 0.2, range(1, 3)),
        (429, 2.1, range(3, 6)),
        (429, float("inf"), range(1, 3)),
        (503, None, range(1, 3)),
        (503, 1e3, range(1_000, 1_501)),
        (504, 2.0, range(2, 4)),
        (500, None, None),
        (400, None, None),
    ],
)
def test_O3_retry_after_is_a_whole_number_of_seconds(
    status: int, wait_s: float | None, seconds: range | None
) -> None:
    error = CoreError(status=status, message="m", retry_after_s=wait_s)
    headers = to_response(error).headers
    assert ("Retry-After" in headers) == (RETRY_MS in headers) == (seconds is not None)
    if seconds is not None:
        assert headers["Retry-After"] in map(str, seconds)


def test_O3_those_who_are_refused_together_do_not_come_back_together() -> None:
    for wait_s in (1, 20):
        error = CoreError(status=429, message="m", retry_after_s=float(wait_s))
        waits = [int(to_response(error).headers[RETRY_MS]) / 1e3 for _ in range(200)]
        spread_s = max(1.0, wait_s / 2)
        assert wait_s <= min(waits) < wait_s + 0.1 * spread_s
        assert wait_s + 0.9 * spread_s < max(waits) <= wait_s + spread_s
        assert len(set(waits)) > 100


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (503, "no_replica")])
def test_O3_whole_seconds_are_spread_too(status: int, code: str) -> None:
    """For those clients that know no other header."""
    for wait_s, most_s in ((1, 2), (10, 15), (40, 60)):
        error = CoreError(status=status, message="m", code=code, retry_after_s=float(wait_s))
        waits = {int(to_response(error).headers["Retry-After"]) for _ in range(1_000)}
        assert waits == set(range(wait_s, most_s + 1))


def test_O3_no_spread_makes_a_wait_longer_than_clients_honour() -> None:
    for wait_s in (41, 59, 60):
        error = CoreError(status=429, message="m", retry_after_s=float(wait_s))
        waits = [int(to_response(error).headers[RETRY_MS]) / 1e3 for _ in range(200)]
        assert wait_s <= min(waits)
        assert max(waits) <= 60.0
