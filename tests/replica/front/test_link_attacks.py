"""What comes in over the link from nobody we know: bad introductions, bent frames, noise."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random

import pytest

from events.request import (
    MAX_LINK_FRAME_BYTES,
    ClearCache,
    LinkHello,
)
from events.wire import encode
from tests.replica.front.rig import SECRET, request, rig
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize(
    "hello",
    [
        LinkHello(version=1, router_id="r", router_boot="b", secret="wrong"),
        LinkHello(version=1, router_id="r", router_boot="b", secret=""),
        LinkHello(version=1, router_id="r", router_boot="b", secret=SECRET + "é"),
        LinkHello(version=99, router_id="r", router_boot="b", secret=SECRET),
        request(),
        b"",
        b"\x80\x04N.",
        "text",
        pickle.dumps({"a": print}),
    ],
)
async def test_S1_a_bad_introduction_closes_the_link(hello) -> None:
    async with rig() as front:
        socket = await front.connect()
        if isinstance(hello, str):
            await socket.send_str(hello)
        else:
            await socket.send_bytes(hello if isinstance(hello, bytes) else encode(hello))
        async with asyncio.timeout(PATIENCE_S):
            message = await socket.receive()
        assert message.data == 1008
        assert not front.engine.requests
        assert "links_refused_total" in (await front.get("/metrics"))[1]


async def test_S1_silence_at_the_door_is_cut_off() -> None:
    async with rig(handshake_s=0.05) as front:
        socket = await front.connect()
        async with asyncio.timeout(PATIENCE_S):
            assert (await socket.receive()).data == 1008


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"",
        pickle.dumps(["x"] * 9),
        encode(request())[:-3],
        encode(LinkHello(version=1, router_id="r", router_boot="b", secret=SECRET)),
        encode(ClearCache(command_id="c", limit_blocks=0)),
        b"\x91" * 100_000,
        "text",
        bytes(MAX_LINK_FRAME_BYTES + 1),
    ],
    ids=[
        "invalid",
        "empty",
        "pickle",
        "truncated",
        "hello again",
        "no blocks",
        "nested",
        "text",
        "too large",
    ],
)
async def test_S1_a_malformed_frame_closes_only_its_link(frame) -> None:
    async with rig() as front:
        router, other = await front.dial(), await front.dial()
        await router.send(request())
        await other.send(request())
        await front.submitted(2)
        try:
            if isinstance(frame, str):
                await router.socket.send_str(frame)
            else:
                await router.socket.send_bytes(frame)
        except ConnectionError:
            pass
        await router.closed()
        await until(lambda: len(front.front.attempts) == 1)
        assert front.front.counters.malformed_frames == 1
        front.engine.step({front.engine.requests[1].child: b"ok"}, finish="stop")
        assert (await other.answer()).text == "ok"


def bent(frame: bytes, rng: random.Random) -> bytes:
    """A frame of ours with some wrong bytes, perhaps cut; or nothing like one."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(60))
    wrong = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        wrong[rng.randrange(len(wrong))] = rng.randrange(256)
    return bytes(wrong[: rng.randint(1, len(wrong))])


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_S1_fuzzed_frames_behind_a_hello(count: int) -> None:
    """Most end their link, some are requests; the replica goes on, and nothing of theirs stays."""
    rng, sent = random.Random(11), 0
    async with rig() as front:
        good = encode(request())
        while sent < count:
            router = await front.dial()
            with contextlib.suppress(ConnectionError):
                for _ in range(8):
                    sent += 1
                    await router.socket.send_bytes(bent(good, rng))
            await router.socket.close()
        await until(lambda: not front.front.attempts)
        router = await front.dial()
        earlier = len(front.engine.requests)
        await router.send(request())
        await front.submitted(earlier + 1)
        front.engine.step({front.engine.requests[-1].child: b"ok"}, finish="stop")
        assert (await router.answer()).text == "ok"


async def test_S1_random_bytes_at_the_port_harm_nobody() -> None:
    rng = random.Random(7)
    async with rig() as front:
        host, port = front.url.removeprefix("http://").split(":")
        for size in (0, 1, 40, 4_000, 200_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(rng.randbytes(size) + pickle.dumps(print))
            writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()
        router = await front.dial()
        for _ in range(300):
            end = await front.connect()
            await end.send_bytes(rng.randbytes(rng.randrange(60)))
            await end.close()
        await router.send(request())
        await front.submitted()
        front.engine.step({front.engine.requests[0].child: b"ok"}, finish="stop")
        assert (await router.answer()).text == "ok"
