"""A real nats-server per test that asks for one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.nats import NatsBus, connect
from events.server import EmbeddedNats
from tests.events.helpers import CLUSTER


class Town:
    """One server and the connections that a test made to it."""

    def __init__(self, server: EmbeddedNats) -> None:
        self.server = server
        self.buses: list[NatsBus] = []

    async def router(self, router: str = "router-0") -> NatsBus:
        return await self._connect(f"router-{router}")

    async def replica(self, replica: str = "r0") -> NatsBus:
        return await self._connect(f"replica-{replica}")

    async def viewer(self) -> NatsBus:
        return await self._connect("viewer")

    async def _connect(self, user: str) -> NatsBus:
        password = self.server._credentials(user).password
        bus = await connect(self.server.url, user, password, user)
        self.buses.append(bus)
        return bus


@contextlib.asynccontextmanager
async def open_town(state_dir: Path) -> AsyncIterator[Town]:
    server = EmbeddedNats(state_dir, CLUSTER, ("r0", "r1"), ("router-0", "router-1"))
    await server.start()
    town = Town(server)
    try:
        yield town
    finally:
        for bus in town.buses:
            await bus.close()
        await server.stop()


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town
