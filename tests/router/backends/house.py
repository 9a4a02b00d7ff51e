"""A gateway in front of scripted servers of another kind, and replicas of our own where asked."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec

from configs.model.card import ModelCard
from configs.schema import BackendConfig
from tests.fakes.openai_server import ForeignServer
from tests.router.gateway.house import House
from tests.waiting import until

PATH = "/v1/chat/completions"


class ForeignHouse(House):
    """`servers` f0, f1, ... are backends of the cluster; `changes` are settings of all of them,
    `more` what else they tell whom asks."""

    def __init__(
        self,
        card: ModelCard,
        servers: int,
        replicas: int = 0,
        changes: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(card, replicas, settings)
        self.servers = [ForeignServer() for _ in range(servers)]
        for server in self.servers:
            server.more |= more or {}
        self._changes = {"dtype": "float32", "model": "up"} | (changes or {})
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ForeignHouse:
        backends = []
        for number, server in enumerate(self.servers):
            await self._stack.enter_async_context(server)
            backends.append(BackendConfig(id=f"f{number}", url=server.url, **self._changes))
        self.config = msgspec.structs.replace(self.config, backends=tuple(backends))
        await super().__aenter__()
        await until(lambda: self.services.backends.up == len(self.servers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._stack.aclose()

    @property
    def asked(self) -> list:
        return [asked for server in self.servers for asked in server.asked]

    def tell(self, script) -> None:
        """The same script for every server."""
        for server in self.servers:
            server.script = script

    def idle(self) -> bool:
        booked = self.services.brain.ledger.booked
        return (
            super().idle()
            and all(server.open == 0 for server in self.servers)
            and all(booked(f"f{number}").requests == 0 for number in range(len(self.servers)))
        )

    def outcome(self, decision_id: str):
        """What became of a decision."""
        return self.services.brain.decisions.get(decision_id).outcome


async def read(house: ForeignHouse, http: aiohttp.ClientSession, body: dict, path: str = PATH):
    """(the response, all of its body)."""
    async with house.post(http, path, body) as response:
        return response, await response.read()
