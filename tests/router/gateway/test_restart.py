"""A router that is killed and started again knows at once what the replicas hold."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import structs

from configs.load import to_toml
from configs.model.card import ModelCard
from events.cache import CacheFact, CacheOp
from events.load import DigestShape
from kvstore.identity import Namespace, chain
from tests.router.gateway.house import COMPLETION
from tests.router.gateway.street import KEY, Street
from tests.waiting import PATIENCE_S, until

OTHERS = 10_000
"""Blocks that each replica holds beside what the test asks for."""

PROMPT = {**COMPLETION, "prompt": "what was said before, at length " * 20}


class Router:
    """One `python -m router.app`."""

    def __init__(self, child: asyncio.subprocess.Process, url: str) -> None:
        self.child = child
        self.url = url

    async def decision(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """Ask, and look up why the answer came from where it did."""
        async with http.post(f"{self.url}/v1/completions", json=PROMPT) as response:
            assert response.status == 200
            name = response.headers["x-warmroute-decision"]
        async with http.get(f"{self.url}/router/decisions/{name}") as response:
            return (await response.json())["decision"]


@asynccontextmanager
async def running(street: Street, folder: Path) -> AsyncIterator[Router]:
    config = folder / "cluster.toml"
    cluster = structs.replace(street.config("router-0"), bus=street.nats.router())
    config.write_text(to_toml(cluster))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.app", "--config", str(config), "--die-with-parent"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            word, url = (await child.stdout.readline()).decode().split()
        assert word == "READY"
        yield Router(child, url)
    finally:
        child.kill()
        await child.communicate()


async def test_E5_after_kill_9_the_first_decision_knows_what_is_warm(
    tiny_card: ModelCard, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    street = Street(tiny_card, tmp_path, replicas=4, routers=0)
    street.digest = DigestShape(bits=1 << 22, k=8)
    async with street:
        async with running(street, tmp_path) as router:
            assert (await router.decision(http))["predicted_cached_tokens"] == 0
            (name,) = (name for name, fake in street.fakes.items() if fake.calls)
            request = street.fakes[name].calls[0].request
            namespace = Namespace.of_hello(street.fakes[name].hello())
            keys = chain(KEY, namespace, request.salt, request.prompt)
            for engine in street.engines.values():
                engine.facts += [CacheFact(CacheOp.STORED, os.urandom(16)) for _ in range(OTHERS)]
            street.engines[name].facts += [CacheFact(CacheOp.STORED, key) for key in keys]
            await until(lambda: not any(engine.facts for engine in street.engines.values()))
            router.child.kill()
        async with running(street, tmp_path) as router:
            first = await router.decision(http)
            assert first["replica"] == name, str(first)
            assert first["predicted_cached_tokens"] == 16 * len(keys) >= 128
