"""What becomes of a connection whose client does not do its part: the gateway's own reading of
requests (`short`) keeps the bounds that the library's (`long`) keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.fakes.scripts import Call
from tests.router.gateway.house import CHAT, House
from tests.router.gateway.ways import LONG, SHORT, asking, dial
from tests.waiting import until

BOTH = pytest.mark.parametrize("way", [SHORT, LONG], ids=["short", "long"])
STREAM = {**CHAT, "stream": True}


def unsent_bytes(house: House) -> int:
    """What the sockets of the clients did not take."""
    door = house.gateway._door
    connections = [*door._express, *door._http.connections]
    return sum(connection.transport.get_write_buffer_size() for connection in connections)


async def swept(house: House) -> None:
    """Until the door has closed whoever is idle, however shortly."""
    door = house.gateway._door
    await until(lambda: door.idlest_s() > 0)
    door._idle_s = 0.0
    door.sweep()
    await until(lambda: door.connections == 0)


@BOTH
async def test_who_does_not_read_a_whole_answer_is_idle(house: House, way: bytes) -> None:
    async def huge(call: Call) -> None:
        await call.send("y" * 6_000_000, finish="stop")

    house.script(huge)
    client = dial(house, 4_096)
    client.sendall(way + asking(CHAT))
    await until(lambda: unsent_bytes(house))
    await house.settled()
    await swept(house)
    client.close()


@BOTH
async def test_who_does_not_read_the_end_of_a_broken_stream_is_idle(
    build: Callable, way: bytes
) -> None:
    house = await build(1, retries=0)
    house.cannot_continue()

    async def until_full(call: Call) -> None:
        while not unsent_bytes(house):
            await call.send("y" * 20_000)
            await asyncio.sleep(0)
        call.replica.break_links()

    house.script(until_full)
    client = dial(house, 4_096)
    client.sendall(way + asking(STREAM))
    await until(lambda: house.calls)
    await house.settled()
    assert unsent_bytes(house)
    await swept(house)
    client.close()
