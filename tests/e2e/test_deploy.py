"""The example files of configs/deploy, on addresses of this machine: two hosts, a bus with TLS."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from msgspec import structs

from configs.load import load_cluster
from events.errors import BusError
from events.nats import connect, join
from events.server import find_binary
from events.subjects import router_subject
from events.tls import authority_context

DEPLOY = Path(__file__).parents[2] / "configs" / "deploy"
HOSTS = {"10.0.0.1": "127.0.0.2", "10.0.0.2": "127.0.0.3"}
USERS = ("ROUTER_A", "ROUTER_B", "REPLICA_R0", "REPLICA_R1")
KEY, ADMIN = "sk-default-0123456789", "admin-0123456789"
PASSWORDS = {f"WR_{user}": f"wr-{user.lower()}-{'0' * 8}" for user in USERS}


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Deployment:
    """The files with this test's addresses, and the processes that run on them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.config = folder / "cluster.toml"
        self.bus_port = free_port("127.0.0.2")
        self.stack = AsyncExitStack()
        self._certificates()
        self._files()

    def _certificates(self) -> None:
        authority = trustme.CA()
        own = authority.issue_cert("127.0.0.2")
        own.cert_chain_pems[0].write_to_path(str(self.folder / "nats-cert.pem"))
        own.private_key_pem.write_to_path(str(self.folder / "nats-key.pem"))
        authority.cert_pem.write_to_path(str(self.folder / "ca.pem"))

    def _files(self) -> None:
        changes = {
            **HOSTS,
            "/etc/warmroute": str(self.folder),
            "/var/lib/warmroute/model.gguf": str(self.model),
            "/var/lib/warmroute": str(self.folder),
            "4222": str(self.bus_port),
            "port = 8000": "port = 0",
            "port = 9000": "port = 0",
            "put the output of `openssl rand -hex 32` here": "ab" * 32,
            "put the output of `printf %s YOUR_ADMIN_KEY | sha256sum` here": sha256(ADMIN),
            "put the output of `printf %s A_TENANTS_KEY | sha256sum` here": sha256(KEY),
        }
        for name in ("nats.conf", "cluster.toml"):
            text = (DEPLOY / name).read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            (self.folder / name).write_text(text)

    async def start_bus(self) -> None:
        server = await asyncio.create_subprocess_exec(
            *(find_binary(), "-c", str(self.folder / "nats.conf")),
            env={**os.environ, **PASSWORDS},
            stderr=subprocess.DEVNULL,
        )
        self.stack.push_async_callback(_end, server)

    async def start(self, module: str, user: str, *args: str, **environ: str) -> str:
        """One process; the url of its READY line."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--config", str(self.config), *args),
            env={
                **os.environ,
                "WARMROUTE_BUS__USER": user,
                "WARMROUTE_BUS__PASSWORD": self.password(user),
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.stack.push_async_callback(_end, child)
        assert child.stdout
        async with asyncio.timeout(60):
            word, url = (await child.stdout.readline()).decode().split()
        assert word == "READY", user
        return url

    def password(self, user: str) -> str:
        """Of a user of nats.conf."""
        short = user.removeprefix("router-").upper().replace("-", "_")
        return PASSWORDS[f"WR_{short}"]


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
    await child.communicate()


@pytest.fixture
async def deployment(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Deployment]:
    made = Deployment(tmp_path, tiny_model)
    async with made.stack:
        await made.start_bus()
        yield made


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 (other processes)
            await asyncio.sleep(0.02)


async def test_S3_the_bus_takes_nobody_without_tls_and_lets_nobody_speak_for_others(
    deployment: Deployment,
) -> None:
    config = load_cluster(deployment.config, environ={})
    assert config.bus.url == f"tls://127.0.0.2:{deployment.bus_port}"
    first = await join(_as(config.bus, deployment, "router-router-a"), "a")
    second = await join(_as(config.bus, deployment, "router-router-b"), "b")
    got: list[bytes] = []
    await second.subscribe(router_subject("main", "*", "peers"), lambda _, data: got.append(data))
    await second.publish(router_subject("main", "router-a", "peers"), b"forged")
    await first.publish(router_subject("main", "router-a", "peers"), b"own")
    assert await first.store("wr_main").load() == []
    await until(_async(lambda: got and second.stats.refused))
    assert got == [b"own"]
    for bus in (first, second):
        await bus.close()
    user, password = "router-router-a", deployment.password("router-router-a")
    with pytest.raises(BusError):
        await connect(config.bus.url.replace("tls", "nats"), user, password, timeout_s=1.0)


async def test_a_server_whose_certificate_nobody_vouches_for_hears_no_password(
    deployment: Deployment, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    config = load_cluster(deployment.config, environ={})
    with pytest.raises(BusError, match="certificate"):
        await join(_as(config.bus, deployment, "router-router-a"), "a")


async def test_a_server_without_tls_hears_no_password(deployment: Deployment) -> None:
    heard = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1048576}\r\n')
        heard.extend(await reader.read(4_096))
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.2", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tls = authority_context(str(deployment.folder / "ca.pem"))
        with pytest.raises(BusError):
            await connect(f"tls://127.0.0.2:{port}", "user", "password", timeout_s=0.5, tls=tls)
    assert heard
    assert b"password" not in heard


@pytest.mark.slow
async def test_two_hosts_serve_as_one(deployment: Deployment) -> None:
    replicas = [
        deployment.start("replica.server", f"replica-{name}", "--replica", name)
        for name in ("r0", "r1")
    ]
    for url, host in zip(await asyncio.gather(*replicas), HOSTS.values(), strict=True):
        assert url.startswith(f"http://{host}:")
    routers = [
        deployment.start(
            "router.app",
            f"router-{name}",
            WARMROUTE_ROUTER__ID=name,
            WARMROUTE_ROUTER__HOST=host,
        )
        for name, host in zip(("router-a", "router-b"), HOSTS.values(), strict=True)
    ]
    first, second = await asyncio.gather(*routers)
    assert second.startswith("http://127.0.0.3:")
    async with aiohttp.ClientSession() as http:
        for url in (first, second):
            await until(lambda url=url: _linked(http, url, 2))
            await until(lambda url=url: _peers(http, url, 1))
        key = "sk-acme-0123456789"
        admin = {"x-warmroute-admin": ADMIN}
        put = http.put(f"{first}/router/tenants/acme", json={"key": key}, headers=admin)
        async with put as response:
            assert (await response.json())["shared"]
        await until(lambda: _chats(http, second, key))
        assert await _chats(http, first, KEY)
        assert not await _chats(http, first, "sk-nobody-0123456789")


def _as(bus: Any, deployment: Deployment, user: str) -> Any:
    return structs.replace(bus, user=user, password=deployment.password(user))


def _async(condition: Callable[[], Any]) -> Callable[[], Any]:
    async def check() -> Any:
        return condition()

    return check


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url, headers={"x-warmroute-admin": ADMIN}) as response:
        return await response.json()


async def _linked(http: aiohttp.ClientSession, url: str, count: int) -> bool:
    views = (await _get(http, f"{url}/router/replicas"))["replicas"]
    return sum(view["linked"] and view["digest_known"] for view in views) == count


async def _peers(http: aiohttp.ClientSession, url: str, count: int) -> bool:
    return len((await _get(http, f"{url}/router/peers"))["peers"]) == count


async def _chats(http: aiohttp.ClientSession, url: str, key: str) -> bool:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
    }
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status == 200
