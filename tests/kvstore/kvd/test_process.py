"""The daemon as its cluster file wants it: other hosts and metrics beside its own users."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from configs.load import ConfigError, to_toml
from configs.schema import ClusterConfig, KvConfig, ModelConfig, TlsConfig
from kvstore.kvd.client import open_tier
from kvstore.kvd.place import host_store_name
from kvstore.kvd.settings import KvdSettings, settings_of
from kvstore.peer.client import PeerTier
from kvstore.remote.build import build_tier
from kvstore.tier import Status
from tests.kvstore.batches import get, put, writes_of
from tests.kvstore.blocks import CLUSTER_KEY, run_of

SOON_S = 60.0


def cluster_file(folder: Path, kv: KvConfig) -> Path:
    config = ClusterConfig(secret=CLUSTER_KEY.hex(), model=ModelConfig(path="m"), kv=kv)
    path = folder / "cluster.toml"
    path.write_text(to_toml(config))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_settings_come_from_the_file_and_flags_win(tmp_path: Path) -> None:
    papers = TlsConfig(cert="c.pem", key="k.pem", ca="ca.pem")
    kv = KvConfig(
        host="/run/kvd.sock",
        host_bytes=1 << 24,
        tenant_share=0.25,
        peer_host="::1",
        peer_tls=papers,
    )
    file = cluster_file(tmp_path, kv)
    assert settings_of(["--config", str(file), "--bytes", "4096"]) == KvdSettings(
        socket=Path("/run/kvd.sock"),
        arena_bytes=4096,
        tenant_share=0.25,
        peer_host="::1",
        peer_tls=papers,
        secret=CLUSTER_KEY,
    )
    assert settings_of(["--socket", "s"]).arena_bytes >= 16 << 20
    with pytest.raises(ConfigError):
        settings_of([])
    with pytest.raises(ConfigError):
        settings_of(["--config", str(cluster_file(tmp_path, KvConfig()))])


def test_other_hosts_and_metrics_are_served_beside_its_users(tmp_path: Path) -> None:
    peer_port, metrics_port = free_port(), free_port()
    kv = KvConfig(
        host=str(tmp_path / "kvd.sock"),
        host_bytes=4 << 20,
        peer_host="127.0.0.1",
        peer_port=peer_port,
        metrics_port=metrics_port,
    )
    command = [sys.executable, "-m", "kvstore.kvd", "--config", str(cluster_file(tmp_path, kv))]
    process = subprocess.Popen(
        [*command, "--die-with-parent"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("READY unix:")
    tier, blocks = open_tier(Path(kv.host), "user"), run_of(3)
    writes = writes_of(blocks)
    assert put(tier, writes) == [Status.STORED] * 3
    far = build_tier(f"peer://127.0.0.1:{peer_port}", secret=CLUSTER_KEY)
    outcomes, payloads, _ = get(far, [block.key for block in blocks])
    assert [outcome.status for outcome in outcomes] == [Status.HIT] * 3
    assert payloads == [bytes(write.payload) for write in writes]
    assert isinstance(far, PeerTier)
    assert far.store == host_store_name(kv.host)
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=SOON_S) as page:
        text = page.read().decode()
    assert "warmroute_kvd_blocks 3.0" in text
    assert "warmroute_kvd_stored_total 3.0" in text
    assert all(block.key.hex() not in text for block in blocks)
    tier.close()
    far.close()
    process.terminate()
    began = time.monotonic()
    assert process.wait(SOON_S) == 0
    assert time.monotonic() - began < SOON_S
    process.stdout.close()
