"""Two hosts that share no memory and no store: a prompt computed on one is answered on the other,
whose replica pulls the blocks from the first one's kvd."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from configs.load import to_toml
from configs.schema import (
    BusConfig,
    ClusterConfig,
    KvConfig,
    ModelConfig,
    ReplicaConfig,
    RouterConfig,
    TenantConfig,
)
from events.server import EmbeddedNats
from kvstore.kvd.place import host_store_name
from tests.e2e.conftest import MODEL
from tests.e2e.test_rows import fresh
from tests.kvstore.conformance.backend import HOST, free_port
from tests.router.gateway.house import ADMIN_KEY, SECRET
from tests.waiting import PATIENCE_S
from tools.up.child import Child

pytestmark = pytest.mark.slow
START_S = 120.0
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
HOSTS = {"p0": "prefill", "d0": "decode"}


class TwoHosts:
    """Use as an async context manager. Each host has a cluster file of its own, as it would."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.children: dict[str, Child] = {}
        self.url = ""
        self._nats = EmbeddedNats(folder / "nats", "local", tuple(HOSTS))
        self._ports = {name: free_port() for name in HOSTS}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TwoHosts:
        try:
            await self._nats.start()
            self._stack.push_async_callback(self._nats.stop)
            for name in HOSTS:
                await self.start(f"kvd-{name}", "kvstore.kvd", name, BusConfig())
                bus = self._nats.replica(name)
                await self.start(name, "replica.server", name, bus, "--replica", name)
            bus = self._nats.router("router-0")
            self.url = await self.start("router", "router.app", "p0", bus)
            self.http = aiohttp.ClientSession()
            self._stack.push_async_callback(self.http.close)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str, module: str, host: str, bus: BusConfig, *flags: str) -> str:
        """A process on one of the hosts; what it says that it serves."""
        file = self.folder / f"{host}.toml"
        file.write_text(to_toml(self._config(host)))
        environ = {"WARMROUTE_BUS__USER": bus.user, "WARMROUTE_BUS__PASSWORD": bus.password}
        args = ("--config", str(file), *flags)
        child = Child(name, module, args, environ, self.folder / f"{name}.log")
        self.children[name] = child
        self._stack.push_async_callback(child.stop)
        return await child.start(START_S)

    def _config(self, host: str) -> ClusterConfig:
        others = tuple(f"peer://{HOST}:{at}" for name, at in self._ports.items() if name != host)
        roles = HOSTS.items()
        return ClusterConfig(
            secret=SECRET,
            model=ModelConfig(path=str(self.model), name=MODEL),
            bus=BusConfig(url=self._nats.url),
            router=RouterConfig(
                port=0, admin_key_sha256=hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
            ),
            replicas=tuple(
                ReplicaConfig(id=name, role=role, dtype="float32")  # type: ignore[arg-type]
                for name, role in roles
            ),
            # Gaps between tokens that nobody keeps: roles are needed.
            tenants=(TenantConfig(name="anonymous", itl_deadline_ms=0.01),),
            kv=KvConfig(
                host=str(self.folder / f"{host}.sock"),
                host_bytes=16 << 20,
                peers=others,
                peer_host=HOST,
                peer_port=self._ports[host],
            ),
        )

    async def get(self, path: str) -> Any:
        async with self.http.get(f"{self.url}{path}", headers=ADMIN) as response:
            return await response.json()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        headers = ADMIN if path.startswith("/router") else {}
        async with self.http.post(f"{self.url}{path}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json(), dict(response.headers)

    async def ask(self, prompt: str) -> tuple[str, dict[str, Any], int]:
        """The text, its decision, and how many tokens were not computed to answer it."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer, headers = await self.post("/v1/completions", {**body, "ignore_eos": True})
        made = await self.get(f"/router/decisions/{headers['x-warmroute-decision']}")
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], made["decision"], cached

    async def until(self, wanted: Any, look: Callable[[dict[str, Any]], Any]) -> None:
        """Until that is what is seen in the list of replicas, by id."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            listed = (await self.get("/router/replicas"))["replicas"]
            if look({of["replica"]: of for of in listed}) == wanted:
                return
            assert time.monotonic() < deadline_s, listed
            await asyncio.sleep(0.05)


def healthy(listed: dict[str, Any]) -> set[str]:
    return {name for name, of in listed.items() if of["state"] == "healthy"}


@pytest.fixture
async def hosts(tmp_path: Path, tiny_model: Path) -> AsyncIterator[TwoHosts]:
    async with TwoHosts(tmp_path, tiny_model) as hosts:
        await hosts.until(set(HOSTS), healthy)
        yield hosts


async def test_a_prompt_travels_from_host_to_host_and_both_may_die(hosts: TwoHosts) -> None:
    store = host_store_name(str(hosts.folder / "p0.sock"))
    await hosts.until([store], lambda listed: listed["d0"]["hello"]["peers"])
    # On a busy machine that may cost more, until what was learnt of a slow hand-off fades.
    async with asyncio.timeout(PATIENCE_S):
        cached = 0
        while not cached:
            prompt = fresh(600)
            text, made, cached = await hosts.ask(prompt)
            assert made["replica"] == "d0"
    assert (made["hand_off"], made["prefilled_by"]) == ("split", "p0")
    assert SECRET not in "".join(log.read_text() for log in hosts.folder.glob("*.log"))
    # The other host dies with all that it held: the same words, computed where they are answered.
    hosts.children["kvd-p0"].kill()
    await hosts.post("/router/cache/clear", {})
    assert (await hosts.ask(prompt))[0] == text
    hosts.children["p0"].kill()
    await hosts.until({"d0"}, healthy)
    await hosts.post("/router/cache/clear", {})
    again, made, cached = await hosts.ask(prompt)
    assert (again, made["prefilled_by"], cached) == (text, "", 0)
