"""The replica as a real process, with a tiny random model and a real bus."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from configs.model.card import load_card
from configs.schema import TlsConfig
from events.envelope import unseal
from events.nats import connect
from events.output import LinkWelcome
from events.request import LINK_VERSION, Hold, LinkHello, Resume
from events.secrets import link_secret
from events.server import EmbeddedNats
from events.subjects import split
from events.tls import client_context
from replica.server import main
from tests.fakes.papers import make_papers
from tests.fakes.tiny_model import write_tiny_gguf
from tests.replica.front.rig import RouterEnd, request
from tests.waiting import PATIENCE_S

SECRET = secrets.token_hex(32)


def write_cluster(folder: Path, nats: EmbeddedNats | None, model: Path, port: int = 0) -> Path:
    bus = nats.replica("replica-0") if nats else None
    path = folder / "cluster.toml"
    path.write_text(
        f"""
cluster = "test"
secret = "{SECRET}"
[model]
path = "{model}"
name = "m"
[bus]
url = "{bus.url if bus else "nats://127.0.0.1:1"}"
user = "{bus.user if bus else ""}"
password = "{bus.password if bus else ""}"
[[replicas]]
id = "replica-0"
port = {port}
kv_blocks = 64
kernel = "torch"
context_tokens = 512
drain_s = 20.0
"""
    )
    return path


async def spawn(config: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "replica.server", "--config", str(config), "--replica", "replica-0", *more),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ready_url(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(PATIENCE_S):
        line = (await process.stdout.readline()).decode()
        if not line:
            raise AssertionError((await process.stderr.read()).decode())
    word, _, url = line.strip().partition(" ")
    assert word == "READY"
    return url


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit status and what it said on stderr."""
    async with asyncio.timeout(PATIENCE_S):
        _, said = await process.communicate()
    return process.returncode, said.decode()


@asynccontextmanager
async def bus(folder: Path) -> AsyncIterator[EmbeddedNats]:
    nats = EmbeddedNats(folder / "nats", "test", ("replica-0",))
    await nats.start()
    try:
        yield nats
    finally:
        await nats.stop()


class Overheard:
    """The kinds of messages of the replica, in order, and waiting for one."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.boots: set[int] = set()
        self._news = asyncio.Event()

    def receive(self, subject: str, payload: bytes) -> None:
        self.kinds.append(split(subject)[2])
        self.boots.add(unseal(payload).boot)
        self._news.set()

    async def wait(self, kind: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while kind not in self.kinds:
                self._news.clear()
                await self._news.wait()


async def dial(
    session: aiohttp.ClientSession, url: str, tls: ssl.SSLContext | bool = True
) -> tuple[RouterEnd, int]:
    router = RouterEnd(await session.ws_connect(url + "/link", ssl=tls))
    secret = link_secret(bytes.fromhex(SECRET))
    await router.send(
        LinkHello(version=LINK_VERSION, router_id="r", router_boot="boot", secret=secret)
    )
    welcome = await router.receive()
    assert isinstance(welcome, LinkWelcome)
    return router, welcome.boot


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(url) as response:
        return response.status, await response.text()


async def test_s3_with_link_tls_only_routers_with_a_certificate_come_in(tmp_path: Path) -> None:
    papers = make_papers(tmp_path / "papers")
    strangers = make_papers(tmp_path / "strangers")
    async with bus(tmp_path) as nats, aiohttp.ClientSession() as session:
        config = write_cluster(tmp_path, nats, write_tiny_gguf(tmp_path / "tiny.gguf"))
        files = "\n".join(f'{name} = "{getattr(papers, name)}"' for name in ("cert", "key", "ca"))
        config.write_text(f"{config.read_text()}[link_tls]\n{files}\n")
        process = await spawn(config, "--die-with-parent")
        try:
            url = await ready_url(process)
            assert url.startswith("https://")
            forged = TlsConfig(cert=strangers.cert, key=strangers.key, ca=papers.ca)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await dial(session, url, client_context(forged))
            router, _ = await dial(session, url, client_context(papers))
            await router.send(request("r1", [1, 2, 3], max_tokens=2, ignore_eos=True))
            assert (await router.answer("r1")).finish.reason == "length"
        finally:
            process.terminate()
            await end(process)


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody reaps has an empty command line."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


async def test_a_replica_serves_drains_and_says_bye(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_card(model).tokenizer
    prompt = tokenizer.encode("the system and the user and the assistant " * 4)
    async with bus(tmp_path) as nats, aiohttp.ClientSession() as session:
        viewer = nats.viewer()
        ear = await connect(viewer.url, viewer.user, viewer.password, "ear")
        heard = Overheard()
        await ear.subscribe("wr.v1.test.replica.*.*", heard.receive)
        process = await spawn(write_cluster(tmp_path, nats, model), "--die-with-parent")
        try:
            url = await ready_url(process)
            router, boot = await dial(session, url)
            await heard.wait("hello")
            await heard.wait("load")
            assert heard.boots == {boot}

            greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
            await router.send(request("cold", prompt, **greedy))
            await router.send(request("warm", prompt, n=2, **greedy))
            cold = await router.answer("cold")
            warm = [await router.answer("warm", child=child) for child in (0, 1)]
            assert cold.finish.reason == "length"
            assert len(cold.token_ids) == 8
            assert cold.text == tokenizer.decode(cold.token_ids)
            assert [w.token_ids for w in warm] == [cold.token_ids] * 2

            await router.send(request("again", prompt, **greedy))
            again = await router.answer("again")
            assert again.token_ids == cold.token_ids
            cached = again.deltas[-1].usage.cached_tokens
            assert 0 < cached < len(prompt)
            assert cached % 16 == 0

            metrics = (await get(session, url + "/metrics"))[1]
            assert "warmroute_replica_attempts 0.0" in metrics
            assert "warmroute_replica_children 0.0" in metrics
            assert 'warmroute_replica_kv_usable{tier="arena"} 1.0' in metrics

            long = {**greedy, "max_tokens": 300}
            await router.send(request("long", prompt, **long))
            await router.send(Hold(request_id="long", attempt=1))
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                while (await get(session, url + "/ready"))[0] != 503:
                    pass
            await router.send(request("late", prompt, **greedy))
            late = (await router.answer("late")).finish.error
            assert (late.status, late.code, late.reroute) == (503, "draining", True)
            await router.send(Resume(request_id="long", attempt=1))
            assert len((await router.answer("long")).token_ids) == 300
            await heard.wait("bye")
            status, said = await end(process)
            assert status == 0, said
            assert "Traceback" not in said
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
            await ear.close()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no file", "No such file"),
        ("not toml", "cluster.toml"),
        ("no replica", "no replica 'other'"),
        ("bad id", "an id needs"),
        ("bad secret", "secret"),
        ("no model", "nowhere.gguf"),
        ("port", "can't be used"),
    ],
)
def test_a_users_mistake_is_one_clear_line(tmp_path: Path, capsys, fault: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if fault == "port" else 0
        config = write_cluster(tmp_path, None, tmp_path / "nowhere.gguf", port)
        if fault == "no file":
            config.unlink()
        elif fault == "not toml":
            config.write_text("cluster = ")
        elif fault == "bad secret":
            config.write_text(config.read_text().replace(SECRET, "canary"))
        replica = {"no replica": "other", "bad id": "a b"}.get(fault, "replica-0")
        assert main(["--config", str(config), "--replica", replica]) == 1
    said = capsys.readouterr().err
    assert says in said.splitlines()[-1]
    assert "Traceback" not in said
    assert "canary" not in said


async def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    async with bus(tmp_path) as nats:
        config = write_cluster(tmp_path, nats, model)
        parent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-m', 'replica.server', *sys.argv[1:]])\n"
            "print('CHILD', child.pid, flush=True)\n"
            "time.sleep(600)\n",
            *("--config", str(config), "--replica", "replica-0", "--die-with-parent"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            lines = [(await parent.stdout.readline()).decode() for _ in range(2)]
        child = int(next(line for line in lines if line.startswith("CHILD")).split()[1])
        assert any(line.startswith("READY") for line in lines), lines
        parent.kill()
        await end(parent)  # its pipes are the child's too: they close when the child has ended
        assert gone(child)
