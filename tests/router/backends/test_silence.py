"""A server of another kind that hangs: plain answers come at their end, so its silence has to be
told from a long answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from router.backends import backends as backends_module
from router.backends import silence as silence_module
from router.backends.attempt import ForeignAttempt
from router.backends.silence import Silence
from router.backends.tail import ToldUsage
from router.fleet.breaker import FAILURES_TO_OPEN
from tests.fakes.openai_server import Asked, answer, piece, silent
from tests.router.backends.house import PATH, read
from tests.router.gateway.house import CHAT, STREAM, distinct, raw_request
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing for 0.3 s hangs, looked for every 50 ms."""
    monkeypatch.setattr(backends_module, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(silence_module, "UNKNOWN_S", 0.3)
    monkeypatch.setattr(silence_module, "LEAST_S", 0.3)


def test_patience_is_what_answers_took_and_no_less() -> None:
    silence = Silence()
    assert silence.allowed_s(10) == silence_module.UNKNOWN_S
    for tokens in (100, 200, 300, 400):
        silence.answered(tokens, 1_000 + 20 * tokens)
    assert silence.allowed_s(1_000) == pytest.approx(3 * 21, rel=0.01)
    assert silence.allowed_s(100_000) == pytest.approx(3 * (1 + 0.02 * 1_024), rel=0.01)
    silence.answered(4_000, 81_000)
    assert silence.allowed_s(100_000) == pytest.approx(3 * 161, rel=0.01)
    assert silence.allowed_s(1) == silence_module.LEAST_S


async def test_the_time_that_a_client_takes_is_not_the_servers(
    build: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a hang would go unnoticed for as many times as long."""
    house = await build()
    seat = house.services.backends.seats["f0"]
    for tokens, streamed in ((100, False), (200, False), (300, True)):
        attempt = ForeignAttempt(None, house.services.brain, None, 1_000)
        with seat.carrying(attempt):
            attempt._started_s -= 0.01 * tokens
            if streamed:
                attempt.ttft_ms = 100.0
            with attempt.held_up():
                attempt._held_up_s -= 600.0
                attempt._started_s -= 600.0
            seat.learn(attempt, ToldUsage(10, tokens, None))
    assert seat.silence.allowed_s(2_000) == pytest.approx(3 * 10.24, rel=0.05)
    assert seat.rates.decode.confidence == 0.0


async def test_a_short_request_that_comes_late_is_no_reason_to_give_a_long_one_up(
    build: Callable,
) -> None:
    house = await build()
    seat = house.services.backends.seats["f0"]
    for tokens in (100, 200, 300, 400):
        seat.silence.answered(tokens, 20 * tokens)
    nobody = (None, None, None)
    long, short = ForeignAttempt(*nobody, 1_000), ForeignAttempt(*nobody, 1)
    with seat.carrying(long):
        seat._heard_s = long._heard_s = long._heard_s - 40.0
        assert not seat.hangs
        with seat.carrying(short):
            assert not seat.hangs
            short._heard_s -= 11.0
            assert seat.hangs
            seat.heard()
            assert not seat.hangs
        seat._heard_s -= 100.0
        assert not seat.hangs
        long._heard_s -= 21.0
        assert seat.hangs


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_what_a_silent_server_has_moves_and_it_is_avoided_and_named(
    build: Callable, http, hasty: None, body: dict
) -> None:
    house = await build(servers=2)
    house.servers[0].script = silent
    asking = [
        asyncio.create_task(read(house, http, distinct(PATH, body, number))) for number in range(4)
    ]
    answers = await asyncio.wait_for(asyncio.gather(*asking), 5)
    assert {response.status for response, _ in answers} == {200}
    assert {response.headers["x-warmroute-replica"] for response, _ in answers} == {"f1"}
    assert house.servers[0].asked
    assert house.fleet.member("f0").breaker.failures >= FAILURES_TO_OPEN
    assert house.fleet.alarms.active("replica_stalled", "f0")
    assert not house.fleet.alarms.active("replica_stalled", "f1")
    for number in range(4, 8):
        response, _ = await read(house, http, distinct(PATH, body, number))
        assert response.headers["x-warmroute-replica"] == "f1"
    await house.settled()


async def test_alone_it_is_named_and_waited_for(build: Callable, http, hasty: None) -> None:
    house = await build()
    go = asyncio.Event()

    async def late(asked: Asked) -> None:
        await go.wait()
        await answer(asked)

    house.tell(late)
    asking = asyncio.create_task(read(house, http, CHAT))
    await until(lambda: house.fleet.alarms.active("replica_stalled", "f0"))
    go.set()
    response, body = await asking
    assert response.status == 200
    assert json.loads(body)["id"] == "f"
    await until(lambda: not house.fleet.alarms.active("replica_stalled", "f0"))
    await house.settled()


async def test_alone_and_mute_it_costs_no_request_more_than_a_first_token_may(
    build: Callable, http, hasty: None
) -> None:
    house = await build(first_token_timeout_s=0.5)
    house.tell(silent)
    response, body = await asyncio.wait_for(read(house, http, CHAT), PATIENCE_S)
    assert response.status == 503
    assert json.loads(body)["error"]["message"] == "the backend says nothing"
    assert house.fleet.member("f0").breaker.failures == 1
    await house.settled()


async def test_idle_it_may_be_silent_for_as_long_as_it_likes(
    build: Callable, http, hasty: None
) -> None:
    house = await build(servers=2)
    await read(house, http, CHAT)
    for _ in range(2):
        probes = len(house.servers[0].probes)
        await until(lambda: len(house.servers[0].probes) > probes + 8)  # noqa: B023
    assert not list(house.fleet.alarms)


async def test_a_plain_answer_may_take_longer_than_a_first_token(build: Callable, http) -> None:
    house = await build(first_token_timeout_s=0.1)

    async def slow(asked: Asked) -> None:
        await asyncio.sleep(0.3)
        await answer(asked)

    house.tell(slow)
    response, _ = await read(house, http, CHAT)
    assert response.status == 200
    assert house.fleet.member("f0").breaker.failures == 0
    await house.settled()


async def test_who_is_not_read_is_not_silent(build: Callable, hasty: None) -> None:
    """A client that takes nothing more is his own fault, not the server's that waits for him."""
    house = await build(servers=2, slow_reader_s=1.0)

    async def flood(asked: Asked) -> None:
        await asked.head()
        while True:
            await asked.event(piece("x" * 50_000))

    house.tell(flood)
    client = raw_request(house, PATH, STREAM)
    await until(lambda: len(house.asked) == 1)
    await house.settled()
    client.close()
    assert not list(house.fleet.alarms)
    assert all(house.fleet.member(name).breaker.failures == 0 for name in ("f0", "f1"))
