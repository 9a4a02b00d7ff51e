"""The gateway as a process, over a real nats-server: start, trouble at start, stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from configs.model.card import ModelCard
from configs.schema import ReplicaConfig
from events.nats import connect
from events.secrets import link_secret
from events.server import EmbeddedNats
from replica.publish import Publisher
from router.openai.stream import DONE
from tests.events.helpers import ListEngine
from tests.fakes.replica import FakeReplica
from tests.fakes.scripts import echo
from tests.router.gateway.house import CHAT, SECRET
from tests.waiting import PATIENCE_S, until


class Process:
    """One `python -m router.app`."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def ready(self) -> str:
        """The URL of the READY line."""
        async with asyncio.timeout(PATIENCE_S):
            line = (await self.child.stdout.readline()).decode()
        assert line.startswith("READY "), line + (await self.child.stderr.read()).decode()
        return line.split()[1]

    async def end(self) -> tuple[int, str]:
        """Exit status and what it said on stderr."""
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await self.child.communicate()
        return self.child.returncode, errors.decode()


class Place:
    """A folder with a nats-server and a cluster file."""

    def __init__(self, folder: Path, model: Path, nats: EmbeddedNats) -> None:
        self.folder = folder
        self.model = model
        self.nats = nats

    def write(self, port: int = 0, secret: str = SECRET, extra: str = "") -> Path:
        user = self.nats.router()
        path = self.folder / "cluster.toml"
        path.write_text(
            f'secret = "{secret}"\n'
            f'[model]\npath = "{self.model}"\nname = "tiny"\n'
            f'[bus]\nurl = "{user.url}"\nuser = "{user.user}"\npassword = "{user.password}"\n'
            f"[router]\nport = {port}\n{extra}"
        )
        return path

    @asynccontextmanager
    async def run(self, config: Path) -> AsyncIterator[Process]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.app", "--config", str(config), "--die-with-parent"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield Process(child)
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()


@pytest.fixture
async def place(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Place]:
    nats = EmbeddedNats(tmp_path, "local", ("r0",))
    await nats.start()
    yield Place(tmp_path, tiny_model, nats)
    await nats.stop()


@asynccontextmanager
async def replica_on_the_bus(place: Place, card: ModelCard) -> AsyncIterator[FakeReplica]:
    key = bytes.fromhex(SECRET)
    user = place.nats.replica("r0")
    bus = await connect(user.url, user.user, user.password, "r0")
    async with FakeReplica("r0", secret=link_secret(key), cluster_key=key, model=card) as fake:
        config = ReplicaConfig(id="r0", heartbeat_ms=50.0, hello_ms=200.0)
        engine = ListEngine()
        publisher = Publisher(bus, "local", "r0", fake.hello(), engine, config, fake.boot)
        await publisher.start()
        yield fake
        await publisher.close()
    await bus.close()


async def status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as response:
        return response.status


async def until_status(http: aiohttp.ClientSession, url: str, wanted: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await status(http, url) != wanted:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)


async def test_R20_life_of_a_gateway(
    place: Place, tiny_card: ModelCard, http: aiohttp.ClientSession
) -> None:
    async with place.run(place.write()) as gateway:
        url = await gateway.ready()
        assert await status(http, f"{url}/health") == 200
        assert await status(http, f"{url}/ready") == 503
        async with replica_on_the_bus(place, tiny_card) as replica:
            await until_status(http, f"{url}/ready", 200)
            async with http.post(f"{url}/v1/chat/completions", json=CHAT) as response:
                assert response.status == 200
            await restart_the_bus(place, http, url)
            await drain_with_an_open_stream(gateway, replica, http, url)


async def restart_the_bus(place: Place, http: aiohttp.ClientSession, url: str) -> None:
    await place.nats.stop()
    for _ in range(3):
        async with http.post(f"{url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
    await place.nats.start()
    async with http.post(f"{url}/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200


async def drain_with_an_open_stream(
    gateway: Process, replica: FakeReplica, http: aiohttp.ClientSession, url: str
) -> None:
    release = asyncio.Event()

    async def slow(call):
        await call.send("one")
        await release.wait()
        await call.send(" two", finish="stop")

    replica.script = slow
    async with http.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        gateway.child.send_signal(signal.SIGTERM)
        await until_status(http, f"{url}/ready", 503)
        release.set()
        assert (await stream.read()).endswith(DONE)
    replica.script = echo
    returncode, errors = await gateway.end()
    assert returncode == 0, errors
    assert "Traceback" not in errors


async def test_trouble_at_the_start_is_one_line(place: Place) -> None:
    taken = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    missing = place.folder / "nowhere.toml"
    wrong_bus = place.folder / "wrong.toml"
    wrong_bus.write_text(place.write().read_text().replace("password = ", 'password = "x" # '))

    async def end(config: Path) -> tuple[int, str]:
        async with place.run(config) as gateway:
            return await gateway.end()

    for returncode, errors in await asyncio.gather(
        *map(end, (place.write(port=port), missing, wrong_bus))
    ):
        assert returncode == 1
        assert errors.startswith("router: ")
        assert len(errors.strip().splitlines()) == 1, errors
    taken.close()
    await taken.wait_closed()


async def test_a_bad_secret_is_not_quoted(place: Place) -> None:
    async with place.run(place.write(secret="abcdefg")) as gateway:
        returncode, errors = await gateway.end()
    assert returncode == 1
    assert "abcdefg" not in errors


async def test_the_gateway_ends_with_its_parent(place: Place) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'router.app', '--config', sys.argv[1],"
        " '--die-with-parent'], stdout=subprocess.PIPE)\n"
        "print(child.pid, child.stdout.readline().decode().strip(), flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(place.write()), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        pid, word, _ = (await parent.stdout.readline()).decode().split()
    assert word == "READY"
    parent.kill()
    await parent.wait()
    await until(lambda: not Path(f"/proc/{pid}/fd").exists() or state(pid) == "Z")
    parent._transport.close()


def state(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
