"""S1: ten thousand odd things at each of a gateway's ends; it goes on, and nothing of them stays.

What a client sends to its port, what a replica says on its link: bytes that are no frame, and
frames that are well-formed and make no sense.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import aiohttp
import msgspec
import pytest

from events.errors import UserError
from events.output import CacheCleared, CoreDelta, CoreFinish, StepFrame, TokenLogprob, Usage
from events.session import Ack
from events.wire import encode
from tests.fakes.scripts import Call, echo
from tests.router.gateway.house import CHAT, House, chat_status
from tests.router.gateway.rig import Rig, collect
from tests.router.gateway.ways import asking
from tests.waiting import until

ODD = (
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -1e308),
    *(float("nan"), float("inf"), "", "stop", "error", "x" * 300, b"", [], {}),
)
MANY = [300, pytest.param(10_000, marks=pytest.mark.slow)]


def bent(data: bytes, dice: random.Random) -> bytes:
    """With some wrong bytes, perhaps cut; or nothing like it."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(60))
    wrong = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        wrong[dice.randrange(len(wrong))] = dice.randrange(256)
    return bytes(wrong[: dice.randint(1, len(wrong))] if dice.random() < 0.3 else wrong)


def odd(value: object, dice: random.Random) -> object:
    """The same with one of its parts replaced, at any depth."""
    if isinstance(value, list | dict) and value and dice.random() < 0.9:
        place = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        parts = value.copy()
        parts[place] = odd(value[place], dice)
        return parts
    return dice.choice(ODD)


def frames_of(call: Call) -> list[bytes]:
    """What a replica may say to this request."""
    key = call.request.request_id, call.request.attempt
    some = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -2.0))),)
    end = CoreFinish(reason="length", stop_reason="x", recomputed_tokens=3, written_blocks=1)
    deltas = [
        CoreDelta(*key, 0, "one", (5,), (), Usage(40, 16, 1)),
        CoreDelta(*key, 0, "two", (6, 7), some, Usage(40, 16, 3), None, some),
        CoreDelta(*key, 0, "", (), (), Usage(40, 16, 3), end),
    ]
    steps = [StepFrame(deltas=(delta,)) for delta in deltas]
    others = (
        StepFrame(deltas=tuple(deltas)),
        Ack(received=1),
        CacheCleared(command_id="c", blocks=2),
    )
    return [encode(frame) for frame in (*steps, *others)]


def spoilt(call: Call, dice: random.Random) -> bytes:
    frame = dice.choice(frames_of(call))
    if dice.random() < 0.3:
        return bent(frame, dice)
    return msgspec.msgpack.encode(odd(msgspec.msgpack.decode(frame), dice))


@pytest.mark.parametrize("count", MANY)
async def test_S1_whatever_a_replica_says_ends_its_link_at_worst(rig: Rig, count: int) -> None:
    dice, said = random.Random(3), 0

    async def hostile(call: Call) -> None:
        nonlocal said
        for _ in range(6):
            said += 1
            await call.ws.send_bytes(spoilt(call, dice))
        call.replica.break_links()

    while said < count:
        await rig.up()
        for replica in rig.replicas:
            replica.script = hostile
        with contextlib.suppress(UserError):
            await collect(rig.run())
    for replica in rig.replicas:
        replica.script = echo
    await rig.up()
    assert await collect(rig.run()) == "one two three"
    await until(rig.idle)


@pytest.mark.parametrize("count", MANY)
async def test_S1_what_makes_no_sense_of_a_replica_costs_its_own_request(
    build, http: aiohttp.ClientSession, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the client: each gets an answer, or the end of one."""
    monkeypatch.setattr("router.fleet.breaker.OPEN_S", 0.0)
    house: House = await build(replicas=1)
    dice, said = random.Random(4), 0

    async def senseless(call: Call) -> None:
        nonlocal said
        for frame in dice.choices(frames_of(call), k=4):
            said += 1
            strange = odd(msgspec.msgpack.decode(frame), dice)
            with contextlib.suppress(Exception):
                msgspec.msgpack.decode(msgspec.msgpack.encode(strange), type=StepFrame)
                await call.ws.send_bytes(msgspec.msgpack.encode(strange))
        await call.answer()

    house.script(senseless)
    while said < count:
        body = {**CHAT, "stream": dice.random() < 0.5, "logprobs": dice.random() < 0.3}
        async with asyncio.timeout(20), house.post(http, "/v1/chat/completions", body) as response:
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await response.read()
    house.script(echo)
    assert await chat_status(house, http) == 200
    await house.settled()
    async with http.get(f"{house.url}/metrics") as metrics:
        assert (metrics.status, "warmroute_" in await metrics.text()) == (200, True)


@pytest.mark.parametrize("count", MANY)
async def test_S1_whatever_a_client_sends_harms_nobody_else(
    house: House, http: aiohttp.ClientSession, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    house.script(echo)
    host, port = house.url.removeprefix("http://").split(":")
    dice, sent = random.Random(5), 0
    good = asking(CHAT), asking({**CHAT, "stream": True})
    while sent < count:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(dice.choice((1, 1, 3))):
            sent += 1
            asked = odd(json.loads(dice.choice(good).partition(b"\r\n\r\n")[2]), dice)
            junk = bent(dice.choice(good), dice)
            with contextlib.suppress(TypeError, ValueError):
                if dice.random() < 0.3:
                    junk = asking(asked)
            writer.write(junk)
        if dice.random() < 0.5:
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert await chat_status(house, http) == 200
    await house.settled()
    assert "unexpected" not in caplog.text
