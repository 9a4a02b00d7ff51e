"""Connections to servers of another kind: as many as there are requests, none idle for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from tests.fakes.openai_server import Asked, ForeignServer, answer
from tests.router.backends.house import PATH, ForeignHouse, read
from tests.router.gateway.house import CHAT, distinct
from tests.waiting import until


async def test_more_requests_than_a_pool_holds_by_default_are_all_under_way(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house, release = await build(), asyncio.Event()

    async def stalled(asked: Asked) -> None:
        await release.wait()
        await answer(asked)

    house.tell(stalled)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
        asking = [
            asyncio.create_task(read(house, many, distinct(PATH, CHAT, number)))
            for number in range(130)
        ]
        await until(lambda: len(house.asked) == 130)
        release.set()
        assert {response.status for response, _ in await asyncio.gather(*asking)} == {200}
    await house.settled()


async def idle(house: ForeignHouse) -> ForeignServer:
    """The only server, once every connection to it was given up; no probe opens another."""
    (server,) = house.servers
    server.health = None
    connector = house.services.backends._clients["f0"]._pooled.connector
    await until(lambda: not connector._conns)
    return server


async def test_a_connection_is_given_up_before_the_server_would(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    """A server may hang up on an idle one while a request is on its way."""
    house = await build(changes={"idle_connection_s": 0.05})
    await read(house, http, CHAT)
    server = await idle(house)
    before = server.connections
    await read(house, http, CHAT)
    assert server.connections == before + 1


async def test_only_a_connection_that_was_used_before_is_replaced(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    """A fresh one that breaks says that the server failed: nothing is asked twice there."""
    house = await build(retries=0, changes={"idle_connection_s": 0.05})

    async def cut(asked: Asked) -> None:
        asked.cut()

    house.tell(cut)
    await idle(house)
    response, _ = await read(house, http, CHAT)
    assert response.status == 503
    assert len(house.asked) == 1
    await house.settled()
