"""A whole gateway on a real socket over scripted replicas."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import uvloop

from configs.model.card import ModelCard, load_card
from events.load import DECODE, PREFILL
from router.dispatch.chutes import chute_kernels
from tests.fakes.replica import FakeReplica
from tests.router.gateway.halves import compute, enter, promise
from tests.router.gateway.house import House
from tests.router.gateway.rig import Rig


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable]:
    """The tests of this folder run on the loop that the process runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tiny_card(tiny_model: Path) -> ModelCard:
    """The card of the random model."""
    return load_card(tiny_model)


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    """Of chutes."""
    found = chute_kernels()
    assert found is not None, "the tests need a compiler"
    return found


@pytest.fixture
async def build(tiny_card: ModelCard) -> AsyncIterator[Callable]:
    """`await build(replicas=2, **router settings)` gives a started House; closed afterwards."""
    async with AsyncExitStack() as stack:

        async def make(replicas: int = 2, **settings: object) -> House:
            house = House(tiny_card, replicas, settings)
            await stack.enter_async_context(house)
            return house

        yield make


@pytest.fixture
async def house(build: Callable) -> House:
    """Two replicas, default settings."""
    return await build()


@pytest.fixture
async def split(build: Callable, http: aiohttp.ClientSession) -> House:
    """One that computes, one that answers, and a store that both reach."""
    house: House = await build(replicas=0)
    await promise(house, http)
    for name, role in (("p0", PREFILL), ("d0", DECODE)):
        await enter(house, name, role)
    house.replicas[0].script = compute
    return house


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain client."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Two replicas without a gateway."""
    async with FakeReplica("r0") as first, FakeReplica("r1") as second:
        rig = Rig([first, second])
        await rig.links.start()
        await rig.up()
        yield rig
        await rig.links.close()


@pytest.fixture
def all_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was just met counts as busy: else which of two was met first would say who answers."""
    monkeypatch.setattr("router.fleet.usage.Usage.told_share", 1.0)
