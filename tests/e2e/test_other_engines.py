"""A real engine behind the relay and the bridge: ours taken for another one, or vLLM on request."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from configs.load import to_toml
from configs.model.card import load_card
from configs.schema import (
    BackendConfig,
    BusConfig,
    ClusterConfig,
    ModelConfig,
    ReplicaConfig,
    RouterConfig,
)
from events.memory import MemoryBus
from events.server import EmbeddedNats
from router.gateway import Gateway
from tests.router.gateway.house import SECRET
from tests.waiting import until
from tools.bridge.discover import discover
from tools.bridge.sidecar import Sidecar
from tools.bridge.source import Endpoints

MODEL = "tiny"
WORDS = "All work and no play makes a long and warm prefix for the cache to hold. " * 8


@asynccontextmanager
async def outer_gateway(
    model: Path, backend: BackendConfig, folder: Path, endpoints: Endpoints | None = None
) -> AsyncIterator[Gateway]:
    """A gateway whose only replica is that backend, and a bridge that tells of it."""
    config = ClusterConfig(
        secret=SECRET,
        model=ModelConfig(path=str(model), name=MODEL),
        router=RouterConfig(port=0),
        backends=(backend,),
    )
    bus, card = MemoryBus(), load_card(model)
    gateway = Gateway(config, card, bus)
    seat = gateway.services.backends.seats[backend.id]

    async def locate() -> Endpoints:
        return endpoints or await discover(seat.backend)

    sidecar = Sidecar(config, seat.backend, card, bus, locate, folder)
    await gateway.start()
    running = asyncio.create_task(sidecar.run())
    try:
        await until(lambda: gateway.services.fleet.index.known(backend.id))
        yield gateway
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await gateway.close()
        await bus.close()


async def predictions_come_true(gateway: Gateway, block_tokens: int) -> None:
    """Ask the same again until its prompt is believed to be there; it must be there then."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": 4, "temperature": 0, "stream": True}
    async with aiohttp.ClientSession() as http:
        for _ in range(20):
            async with http.post(f"{gateway.url}/v1/completions", json=body) as response:
                assert response.status == 200
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
                found = response.headers["x-warmroute-decision"]
            record = gateway.services.brain.decisions.get(found)
            gateway.services.brain.optimistic.forget_replica(record.decision.replica)
            if record.decision.predicted_cached_tokens:
                break
            await asyncio.sleep(0.1)
    assert record.decision.predicted_cached_tokens >= 2 * block_tokens
    assert abs(record.outcome.cached_tokens - record.decision.predicted_cached_tokens) < (
        block_tokens + 1
    )
    assert not len(gateway.services.fleet.alarms)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
async def test_our_own_engine_taken_for_another_one(tiny_model: Path, tmp_path: Path) -> None:
    """Replica > vLLM's events > bridge > digest, and gateway > relay > gateway > replica."""
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    nats = EmbeddedNats(tmp_path / "nats", "local", ("r0",))
    replica = ReplicaConfig(id="r0", kv_blocks=256, kv_events=ports[0], kv_events_replay=ports[1])
    async with AsyncExitStack() as stack:
        await nats.start()
        stack.push_async_callback(nats.stop)
        inner = ClusterConfig(
            secret="22" * 32,
            model=ModelConfig(path=str(tiny_model), name="inner"),
            bus=BusConfig(url=nats.url),
            router=RouterConfig(port=0),
            replicas=(replica,),
        )
        file = tmp_path / "inner.toml"
        file.write_text(to_toml(inner))
        words = ("replica.server", "--config", str(file), "--replica", "r0")
        await child(stack, nats.replica("r0"), *words)
        url = await child(stack, nats.router(), "router.app", "--config", str(file))
        backend = BackendConfig(id="b0", url=url, model="inner", events="bridge", cache_salt=False)
        gateway = await stack.enter_async_context(
            outer_gateway(tiny_model, backend, tmp_path, Endpoints(*ports))
        )
        await predictions_come_true(gateway, 16)


async def child(stack: AsyncExitStack, bus: BusConfig, module: str, *words: str) -> str:
    """A process of ours; the URL that it is ready at."""
    environ = {"WARMROUTE_BUS__USER": bus.user, "WARMROUTE_BUS__PASSWORD": bus.password}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
    )

    async def stop() -> None:
        process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().split()[1]


@pytest.mark.vllm
async def test_a_real_vllm(real_model: Path, tmp_path: Path) -> None:
    """WARMROUTE_VLLM is the address of a server of the default model, with KV events over ZMQ and
    --enable-prompt-tokens-details; WARMROUTE_VLLM_MODEL its name there, WARMROUTE_VLLM_BLOCK its
    block size."""
    block_tokens = int(os.environ.get("WARMROUTE_VLLM_BLOCK", "32"))
    backend = BackendConfig(
        id="v0",
        url=os.environ["WARMROUTE_VLLM"],
        model=os.environ.get("WARMROUTE_VLLM_MODEL", "smollm2"),
        events="bridge",
        block_tokens=block_tokens,
    )
    async with outer_gateway(real_model, backend, tmp_path) as gateway:
        await predictions_come_true(gateway, block_tokens)
