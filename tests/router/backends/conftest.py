"""Gateways over backends, on the loop that the process runs on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from configs.model.card import ModelCard
from tests.router.backends.house import ForeignHouse
from tests.router.gateway.conftest import http, pytest_asyncio_loop_factories, tiny_card

__all__ = ["http", "pytest_asyncio_loop_factories", "tiny_card"]


@pytest.fixture
async def build(tiny_card: ModelCard) -> AsyncIterator[Callable]:
    """`await build(servers=1, replicas=0, **settings)`: a started ForeignHouse."""
    async with AsyncExitStack() as stack:

        async def make(servers: int = 1, **settings: object) -> ForeignHouse:
            return await stack.enter_async_context(ForeignHouse(tiny_card, servers, **settings))

        yield make


@pytest.fixture
async def house(build: Callable) -> ForeignHouse:
    """One server, default settings."""
    return await build()
