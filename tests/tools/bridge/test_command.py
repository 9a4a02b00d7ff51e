"""`warmroute bridge` as a process, and what it says when it can't work."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from configs.load import to_toml
from configs.schema import BackendConfig, BusConfig, ClusterConfig, ModelConfig
from events.server import EmbeddedNats
from tests.fakes.kv_publisher import KvPublisher
from tests.router.gateway.house import SECRET
from tests.waiting import PATIENCE_S
from tools.bridge.command import main
from tools.errors import CommandError


def cluster_file(folder: Path, model: Path, bus: BusConfig, *backends: BackendConfig) -> Path:
    config = ClusterConfig(
        secret=SECRET, model=ModelConfig(path=str(model), name="tiny"), bus=bus, backends=backends
    )
    path = folder / "cluster.toml"
    path.write_text(to_toml(config))
    return path


@pytest.mark.parametrize(
    ("own_id", "why"), [("f9", "no backend 'f9'"), ("f0", 'needs events = "bridge"')]
)
def test_what_cannot_work_is_said(tmp_path: Path, own_id: str, why: str) -> None:
    backend = BackendConfig(id="f0", url="http://127.0.0.1:9")
    path = cluster_file(tmp_path, tmp_path, BusConfig(), backend)
    with pytest.raises(CommandError, match=why):
        main(["--config", str(path), "--id", own_id])


async def test_it_runs_until_it_is_told_to_stop(tmp_path: Path, tiny_model: Path) -> None:
    nats = EmbeddedNats(tmp_path / "nats", "local", ("f0",))
    await nats.start()
    try:
        async with KvPublisher() as engine:
            backend = BackendConfig(id="f0", url="http://127.0.0.1:9", events="bridge")
            path = cluster_file(tmp_path, tiny_model, nats.replica("f0"), backend)
            words = ("bridge", "--config", str(path), "--id", "f0", "--events", engine.events)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tools.cli", *words), stdout=asyncio.subprocess.PIPE
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    assert (await process.stdout.readline()).startswith(b"READY http://127.0.0.1:9")
                    await engine.subscribed()
                    process.send_signal(signal.SIGTERM)
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    finally:
        await nats.stop()
