"""Engine, bridge, bus and gateway together: real ZMQ, real NATS, real HTTP, a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from configs.model.card import ModelCard, load_card
from configs.schema import BackendConfig
from events.nats import connect
from events.server import EmbeddedNats
from router.backends.roster import Backend
from router.tenancy.tenants import scope_salt, scope_tag
from tests.fakes.kv_publisher import CLEARED, KvPublisher, removed, stored
from tests.router.backends.house import ForeignHouse
from tests.router.gateway.house import KEYS, SECRET
from tests.waiting import PATIENCE_S, until
from tools.bridge.discover import discover
from tools.bridge.sidecar import Sidecar, open_salts

BLOCK = 16
PROMPT = [number % 50 for number in range(6 * BLOCK)]
TAG = scope_tag(bytes.fromhex(SECRET), "alice", "private")


def anywhere(address: str) -> str:
    """As a server says that listens there."""
    return address.replace("127.0.0.1", "*")


class BridgedHouse(ForeignHouse):
    """Two backends; the first one's engine publishes, and a sidecar tells of it."""

    def __init__(self, card: ModelCard, folder: Path) -> None:
        super().__init__(card, 2, changes={"events": "bridge"})
        self.folder = folder
        self.engine = KvPublisher()
        self.nats = EmbeddedNats(folder / "nats", "local", ("f0", "f1"))
        self.sidecar: Sidecar
        self._more = AsyncExitStack()

    async def __aenter__(self) -> BridgedHouse:
        await self._more.enter_async_context(self.engine)
        await self.nats.start()
        self._more.push_async_callback(self.nats.stop)
        router = self.nats.router()
        self.bus = await connect(router.url, router.user, router.password, "router-0")
        await super().__aenter__()
        self.servers[0].more["/kv_event_sources"] = {
            "0": {"endpoint": anywhere(self.engine.events), "replay_endpoint": self.engine.replay}
        }
        own = self.nats.replica("f0")
        bus = await connect(own.url, own.user, own.password, "f0")
        self._more.push_async_callback(bus.close)
        backend = self.services.backends.seats["f0"].backend
        self.sidecar = Sidecar(
            self.config, backend, self.card, bus, lambda: discover(backend), self.folder
        )
        running = asyncio.create_task(self.sidecar.run())
        self._more.push_async_callback(self._stop, running)
        await self.told()
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._more.aclose()

    async def told(self) -> None:
        """Until the router has the digest of the engine."""
        await until(lambda: self.locality() == "digest")

    def locality(self) -> str:
        (view, _) = self.fleet.replicas()
        return view.locality

    async def overlap(self, http: aiohttp.ClientSession, key: str | None) -> dict[str, int]:
        """Leading blocks that the router believes to be on each backend, and the choice."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        async with self.post(http, "/v1/completions", body, key) as response:
            assert response.status == 200
            decision = response.headers["x-warmroute-decision"]
        found = self.services.brain.decisions.get(decision).decision
        self.services.brain.optimistic.forget_replica("f0")
        self.services.brain.optimistic.forget_replica("f1")
        return {"chosen": found.replica} | {
            terms.replica: terms.overlap_blocks for terms in found.candidates
        }

    @staticmethod
    async def _stop(task: asyncio.Task) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="module")
def card(tiny_model: Path) -> ModelCard:
    return load_card(tiny_model)


@pytest.fixture
async def house(card: ModelCard, tmp_path: Path) -> AsyncIterator[BridgedHouse]:
    async with BridgedHouse(card, tmp_path) as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def believes(house: BridgedHouse, http, key: str | None, blocks: int) -> None:
    """Until the router believes in so many blocks on f0."""
    async with asyncio.timeout(PATIENCE_S):
        while (await house.overlap(http, key))["f0"] != blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_prompt_goes_where_the_engine_says_that_it_is_warm(
    house: BridgedHouse, http: aiohttp.ClientSession
) -> None:
    alice, bob, heard = KEYS["alice"], KEYS["bob"], []
    await house.bus.subscribe("wr.v1.local.>", lambda _, payload: heard.append(bytes(payload)))
    await house.engine.send(stored(list(range(6)), PROMPT, salt=TAG))
    await believes(house, http, alice, 6)
    assert (await house.overlap(http, alice))["chosen"] == "f0"
    assert house.servers[0].asked[-1].body["cache_salt"] == TAG
    assert (await house.overlap(http, bob))["f0"] == 0
    await house.engine.send(removed(5), removed(4))
    await believes(house, http, alice, 4)
    await house.engine.send(CLEARED)
    await believes(house, http, alice, 0)
    assert heard
    secrets = (
        TAG.encode(),
        bytes.fromhex(TAG),
        scope_salt(bytes.fromhex(SECRET), "alice", "private"),
    )
    assert not any(secret in payload for payload in heard for secret in secrets)


async def test_E8_a_restarted_engine_is_another_life(
    house: BridgedHouse, http: aiohttp.ClientSession
) -> None:
    await house.engine.send(stored(list(range(6)), PROMPT, salt=TAG))
    await believes(house, http, KEYS["alice"], 6)
    boot = house.fleet.member("f0").boot
    await house.engine.restart()
    await until(lambda: house.sidecar.lives == 2)
    await until(lambda: house.fleet.member("f0").boot > boot)
    await house.told()
    await believes(house, http, KEYS["alice"], 0)
    await house.engine.send(stored([1, 2, 3], PROMPT[: 3 * BLOCK], salt=TAG))
    await believes(house, http, KEYS["alice"], 3)


async def test_E9_what_the_bus_lost_is_made_up_for(
    house: BridgedHouse, http: aiohttp.ClientSession
) -> None:
    await house.nats.stop()
    for number in range(6):
        tokens = PROMPT[number * BLOCK : (number + 1) * BLOCK]
        parent = number - 1 if number else None
        await house.engine.send(stored([number], tokens, parent=parent, salt=TAG))
    await until(lambda: len(house.sidecar.cache) == 6)
    await house.nats.start()
    await believes(house, http, KEYS["alice"], 6)


async def test_a_backend_without_its_bridge_still_serves(
    house: BridgedHouse, http: aiohttp.ClientSession
) -> None:
    await house._more.pop_all().aclose()
    await until(lambda: house.locality() != "digest")
    assert (await house.overlap(http, None))["chosen"] in ("f0", "f1")
    assert house.services.backends.up == 2


def test_without_salts_a_block_counts_for_every_scope_of_the_file(card: ModelCard) -> None:
    house = ForeignHouse(card, 0)
    salted = BackendConfig(id="f0", url="http://x:1")
    open_ = BackendConfig(id="f0", url="http://x:1", cache_salt=False)
    assert open_salts(house.config, Backend(salted, "", "")) == ()
    assert len(open_salts(house.config, Backend(open_, "", ""))) == 3
