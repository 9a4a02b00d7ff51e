"""The gateway with its scripted replicas, and what every test asks of it."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any

import aiohttp

from configs.model.card import ModelCard
from configs.schema import ClusterConfig, ModelConfig, RouterConfig, TenantConfig
from events.memory import MemoryBus
from events.secrets import link_secret
from router.gateway import Gateway
from tests.fakes.replica import FakeReplica
from tests.waiting import until

SECRET = "11" * 32
ADMIN_KEY = "admin-key-of-the-tests"
KEYS = {"alice": "sk-alice-0123", "bob": "sk-bob-0123"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
STREAM = {**CHAT, "stream": True}
ENDPOINTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", STREAM),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "stream": True}),
]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class House:
    """Use as an async context manager; leaving it stops everything. Scripts that never answer hold
    nobody up: a replica may be given any amount of prefill unless the settings say otherwise."""

    def __init__(self, card: ModelCard, replicas: int, settings: dict[str, Any]) -> None:
        self.config = ClusterConfig(
            secret=SECRET,
            model=ModelConfig(path=str(card.path), name="tiny"),
            router=RouterConfig(
                port=0,
                admin_key_sha256=sha256(ADMIN_KEY),
                **({"prefill_ahead_ms": 8e7} | settings),
            ),
            tenants=tuple(
                TenantConfig(name=name, key_sha256=(sha256(key),)) for name, key in KEYS.items()
            ),
        )
        self.bus = MemoryBus()
        self.revision_cards: dict[str, ModelCard] = {}
        self.adapters: dict[str, str] = {}
        self.card = card
        self.replicas = [self.new_replica(f"r{number}") for number in range(replicas)]
        self.gateway: Gateway

    def new_replica(self, name: str, **changes: Any) -> FakeReplica:
        key = bytes.fromhex(SECRET)
        settings = {"secret": link_secret(key), "cluster_key": key, "model": self.card}
        return FakeReplica(name, **(settings | changes))

    async def __aenter__(self) -> House:
        more = self.revision_cards, self.adapters
        self.gateway = Gateway(self.config, self.card, self.bus, *more)
        await self.gateway.start()
        for replica in self.replicas:
            await replica.__aenter__()
            replica.announce(self.fleet)
        await self.up(len(self.replicas))
        return self

    async def __aexit__(self, *_: object) -> None:
        for replica in self.replicas:
            await replica.die()
        await self.gateway.close()
        await self.bus.close()

    async def up(self, count: int) -> None:
        await until(lambda: len(self.services.links.up()) == count)

    @property
    def services(self):
        return self.gateway.services

    @property
    def fleet(self):
        return self.services.fleet

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def calls(self) -> list:
        return [call for replica in self.replicas for call in replica.calls]

    def script(self, script) -> None:
        """The same script for every replica."""
        for replica in self.replicas:
            replica.script = script

    def cannot_continue(self) -> None:
        """As with replicas of an earlier version, or foreign ones."""
        for link in self.services.links.all():
            link.continues = False

    def idle(self) -> bool:
        """Nothing is held anywhere: gate, queue, links, reservations, replicas."""
        of = self.services
        return (
            of.gate.requests == 0
            and of.gate.tokens == 0
            and of.admitter.queue.requests == 0
            and of.links.in_flight == 0
            and all(of.brain.ledger.booked(r.replica_id).requests == 0 for r in self.replicas)
            and all(replica.open_calls == 0 for replica in self.replicas)
        )

    async def settled(self) -> None:
        """Wait until nothing is held."""
        await until(self.idle)

    def post(self, http: aiohttp.ClientSession, path: str, body: Any, key: str | None = None):
        """A request context."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return http.post(f"{self.url}{path}", json=body, headers=headers)


def events(body: bytes) -> list[bytes]:
    """The data lines of a stream, in order; comments left out."""
    lines = body.split(b"\n\n")
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


async def chat_status(house: House, http: aiohttp.ClientSession) -> int:
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        await response.read()
        return response.status


async def status_of(house: House, http: aiohttp.ClientSession, path: str, body: dict) -> int:
    async with house.post(http, path, body) as response:
        await response.read()
        return response.status


def distinct(path: str, body: dict, number: int) -> dict:
    text = f"{number} is the number of this prompt"
    if "chat" in path:
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": text}


def raw_request(house: House, path: str, body: dict) -> socket.socket:
    """A request over a bare socket, so that it can be closed in any way."""
    host, port = house.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode() + data)
    return client
