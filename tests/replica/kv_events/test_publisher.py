"""A replica's cache over real ZMQ sockets, read by the bridge that reads vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from configs.load import ConfigError
from replica.cache.journal import Journal
from replica.kv_events.log import KvEventLog
from replica.kv_events.publisher import KvEventPublisher, check_address
from tests.replica.kv_events.test_log import BLOCK, KEY, SALT, SPACE, pack
from tests.waiting import until
from tools.bridge.cache import EngineCache
from tools.bridge.follow import Follower
from tools.bridge.source import Endpoints, EventSource


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable]:
    """The loop that a replica runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def published() -> AsyncIterator[tuple[KvEventLog, KvEventPublisher]]:
    log = KvEventLog(BLOCK)
    publisher = KvEventPublisher(log, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    await publisher.start()
    yield log, publisher
    await publisher.close()


async def test_a_reader_that_comes_late_learns_all(
    published: tuple[KvEventLog, KvEventPublisher],
) -> None:
    log, publisher = published
    for number in range(50):
        log.stored(bytes([number]) * 16, None, pack([number] * BLOCK))
    await until(lambda: publisher.number > 0)
    endpoints = Endpoints(publisher.address(), publisher.replay_address())
    cache = EngineCache(KEY, SPACE, (SALT,), Journal())
    async with EventSource(endpoints) as source:
        await source.connected()
        follower = Follower(source, cache)
        await follower.catch_up()
        assert len(cache) == 50
        following = asyncio.create_task(follower.follow())
        log.removed(bytes([7]) * 16)
        await until(lambda: len(cache) == 49)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert not follower.counts


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "x"])
def test_S1_token_ids_are_for_this_machine_only(address: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        check_address(address)


async def test_an_address_in_use_is_a_clear_error(
    published: tuple[KvEventLog, KvEventPublisher],
) -> None:
    with pytest.raises(ConfigError, match="can't be used"):
        KvEventPublisher(KvEventLog(BLOCK), published[1].address())
