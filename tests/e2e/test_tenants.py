"""S6 on real processes and a real model: a flood waits in its own line."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from openai import AsyncOpenAI

from tests.e2e.up import Up

STREAMS = 50
ASKED = 16
EVERY_S = 2.5
POLITE_KEY = "sk-polite-of-the-tests"
_numbers = itertools.count()

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Up]:
    """The default model on two replicas."""
    cluster = Up(tmp_path / "state", "--port", "0", "--replicas", "2")
    try:
        yield cluster.wait_ready()
    finally:
        cluster.close()


def unique(words: int) -> str:
    """A text that shares no block with any other."""
    number = next(_numbers)
    return " ".join(f"{number * 7919 + word}" for word in range(words))


async def ttft_s(client: AsyncOpenAI) -> float:
    """Seconds until the first chunk of a long prompt that nobody has sent before."""
    began_s = time.monotonic()
    stream = await client.completions.create(
        model="smollm2-135m-instruct", prompt=unique(40), max_tokens=4, stream=True
    )
    first_s = 0.0
    async for _ in stream:
        first_s = first_s or time.monotonic() - began_s
    return first_s


async def polite(client: AsyncOpenAI) -> float:
    """The 95th percentile over requests at a steady pace."""
    asked = []
    for _ in range(ASKED):
        asked.append(asyncio.create_task(ttft_s(client)))
        await asyncio.sleep(EVERY_S)
    return sorted(await asyncio.gather(*asked))[int(0.95 * (ASKED - 1))]


async def flood(client: AsyncOpenAI, ttfts_s: list[float]) -> None:
    while True:
        ttfts_s.append(await ttft_s(client))


async def most_waiting(cluster: Up) -> int:
    """The longest queue of any replica, looked at once a second."""
    most = 0
    for _ in range(int(ASKED * EVERY_S)):
        await asyncio.sleep(1)
        told = await asyncio.to_thread(cluster.get_json, "/router/replicas")
        most = max(most, *(of["load"]["waiting"] for of in told["replicas"]))
    return most


async def test_S6_beside_fifty_streams_nobody_else_waits_in_their_line(cluster: Up) -> None:
    """Twice the time alone is held in virtual time (tests/router/waiting): here two replicas, the
    router and the clients share the processor, which makes everything slower at once."""
    admin = json.loads((cluster.state / "keys.json").read_text())["admin_key"]
    body = json.dumps({"key": POLITE_KEY}).encode()
    assert cluster.call("PUT", "/router/tenants/polite", body, admin)[0] == 200
    url, flooded_s = f"{cluster.url}/v1", []
    async with (
        AsyncOpenAI(base_url=url, api_key=POLITE_KEY) as one,
        AsyncOpenAI(base_url=url, api_key=cluster.key, timeout=300) as many,
    ):
        await ttft_s(one)
        streams = [asyncio.create_task(flood(many, flooded_s)) for _ in range(STREAMS)]
        await asyncio.sleep(20)
        watch = asyncio.create_task(most_waiting(cluster))
        polite_s = await polite(one)
        assert await watch <= 2
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert polite_s < median(flooded_s[STREAMS // 2 :]) / 3
