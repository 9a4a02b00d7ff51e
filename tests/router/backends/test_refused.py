"""Servers of other kinds that refuse: what is the caller's to read, and what is ours to mend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.fakes.openai_server import Asked, answer, refuse
from tests.router.backends.house import PATH, ForeignHouse, read
from tests.router.gateway.house import CHAT, STREAM, distinct


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (422, 422), (413, 413)])
async def test_R11_a_callers_mistake_is_passed_on_and_opens_no_breaker(
    house: ForeignHouse, http, status: int, seen: int
) -> None:
    house.tell(refuse(status))
    for _ in range(5):
        response, body = await read(house, http, STREAM)
        assert response.status == seen
        assert json.loads(body)["error"]["message"] == "no"
    assert house.fleet.member("f0").breaker.failures == 0
    await house.settled()


@pytest.mark.parametrize(
    ("status", "seen", "faults"),
    [
        (401, 502, 1),
        (407, 502, 1),
        (403, 502, 0),
        (404, 502, 0),
        (429, 503, 0),
        (500, 502, 1),
        (503, 503, 1),
        (307, 502, 1),
    ],
)
async def test_what_is_no_callers_mistake_is_not_blamed_on_him(
    house: ForeignHouse, http, status: int, seen: int, faults: int
) -> None:
    house.tell(refuse(status))
    response, body = await read(house, http, CHAT)
    assert response.status == seen
    assert json.loads(body)["error"]["type"] == "server_error"
    assert house.fleet.member("f0").breaker.failures == faults
    ours = status in (401, 403, 404, 407)
    assert house.fleet.alarms.active("backend_refuses", "f0") == ours
    house.tell(answer)
    response, _ = await read(house, http, CHAT)
    assert response.status == 200
    assert not house.fleet.alarms.active("backend_refuses", "f0")


async def test_a_backend_that_refuses_our_key_costs_no_client_an_answer(
    build: Callable, http
) -> None:
    """However many: they would soon be more than the budget of retries holds."""
    house = await build(servers=2)
    wrong = house.servers[0]
    wrong.script = refuse(401)
    for number in range(60):
        response, _ = await read(house, http, distinct(PATH, CHAT, number))
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "f1")
    assert 1 <= len(wrong.asked) < 15
    await house.settled()


async def test_when_to_come_again_is_the_servers_to_say(house: ForeignHouse, http) -> None:
    async def script(asked: Asked) -> None:
        await asked.plain(429, {}, Retry_After="7")

    house.tell(script)
    response, _ = await read(house, http, CHAT)
    assert response.status == 503
    assert 7 <= int(response.headers["Retry-After"]) <= 11


async def test_S3_redirects_are_not_followed(build: Callable, http) -> None:
    house = await build(servers=2)
    lure = house.servers[1]

    async def redirect(asked: Asked) -> None:
        await asked.plain(307, {}, Location=lure.url + asked.path)

    house.servers[0].script = redirect
    await read(house, http, CHAT)
    assert len(lure.asked) <= 1
    assert all("host" in a.headers and str(lure.port) in a.headers["host"] for a in lure.asked)


SALT_REFUSALS = [
    {"error": {"message": "Unrecognized request argument supplied: cache_salt", "param": None}},
    {"error": {"message": "no", "param": "cache_salt"}},
    {"detail": [{"type": "extra_forbidden", "loc": ["body", "cache_salt"], "input": "SALT"}]},
]


@pytest.mark.parametrize("told", SALT_REFUSALS)
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_refused_cache_salt_is_this_gateways_fault_and_no_clients(
    house: ForeignHouse, http, told: dict, body: dict
) -> None:
    async def script(asked: Asked) -> None:
        text = json.dumps(told).replace("SALT", asked.body["cache_salt"])
        await asked.plain(400, json.loads(text))

    house.tell(script)
    response, answered = await read(house, http, body)
    error = json.loads(answered)["error"]
    assert (response.status, error["type"], error["code"]) == (502, "server_error", "salt_refused")
    assert "cache_salt = false" in error["message"]
    assert house.asked[0].body["cache_salt"] not in answered.decode()
    assert all("cache_salt" in asked.body for asked in house.asked)
    assert house.fleet.alarms.active("salt_refused", "f0")
    house.tell(answer)
    await read(house, http, body)
    assert not house.fleet.alarms.active("salt_refused", "f0")
    await house.settled()


async def test_a_refusal_is_the_clients_where_only_he_spoke_of_a_salt(
    house: ForeignHouse, http
) -> None:
    async def script(asked: Asked) -> None:
        detail = [{"type": "missing", "loc": ["body", "n"], "input": asked.body}]
        await asked.plain(422, {"detail": detail})

    house.tell(script)
    mine = {**CHAT, "messages": [{"role": "user", "content": "what does cache_salt do?"}]}
    response, answered = await read(house, http, mine)
    assert response.status == 422
    assert b"what does cache_salt do?" in answered
    assert house.asked[0].body["cache_salt"] not in answered.decode()
    assert not list(house.fleet.alarms)


async def test_a_refusal_that_comes_in_parts_is_read_whole(house: ForeignHouse, http) -> None:
    """The part that names the salt may be the last one."""

    async def script(asked: Asked) -> None:
        salt = asked.body["cache_salt"]
        await asked.head(400, "application/json")
        await asked.chunk(b'{"error":{"message":"cache_')
        await asyncio.sleep(0.05)
        if asked.body.get("stream"):
            await asked.chunk(b'salt is not known","param":null}}')
        else:
            await asked.chunk(b'control","type":"x","param":"' + salt.encode() + b'"}}')
        await asked.end()

    house.tell(script)
    response, answered = await read(house, http, CHAT)
    assert response.status == 400
    error = {"message": "cache_control", "type": "x", "param": "..."}
    assert json.loads(answered) == {"error": error}
    response, answered = await read(house, http, STREAM)
    assert json.loads(answered)["error"]["code"] == "salt_refused"
    await house.settled()
