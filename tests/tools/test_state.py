"""The state folder of a local cluster."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
from pathlib import Path

import pytest

from configs.load import load_cluster, to_toml
from configs.schema import ClusterConfig, ModelConfig
from tests.fakes.tiny_model import write_tiny_gguf
from tools.errors import CommandError
from tools.up.cluster import LocalCluster
from tools.up.command import options_of
from tools.up.options import UpOptions, check_port_free, cluster_config
from tools.up.state import lock, open_state, read_keys, sha256_hex, write_cluster


def options(folder: Path) -> UpOptions:
    return UpOptions(state=folder, model=folder / "m.gguf", model_name="m", replicas=3)


def test_keys_are_private_and_survive(tmp_path: Path) -> None:
    first = open_state(tmp_path / "s")
    second = open_state(tmp_path / "s")
    assert first.keys == second.keys
    assert stat.S_IMODE((tmp_path / "s" / "keys.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_two_clusters_have_different_secrets(tmp_path: Path) -> None:
    assert open_state(tmp_path / "a").keys != open_state(tmp_path / "b").keys


def test_the_cluster_file_reads_back_and_holds_no_api_key(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    config = cluster_config(options(tmp_path), state, "nats://127.0.0.1:1")
    write_cluster(state, config)
    assert load_cluster(state.cluster_file, environ={}) == config
    text = state.cluster_file.read_text()
    assert state.keys.api_key not in text
    assert state.keys.admin_key not in text
    assert sha256_hex(state.keys.api_key) in text
    assert [replica.id for replica in config.replicas] == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("host", "anonymous"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_only_loopback_needs_no_key(tmp_path: Path, host: str, anonymous: bool) -> None:
    asked = dataclasses.replace(options(tmp_path), host=host)
    config = cluster_config(asked, open_state(tmp_path / "s"), "nats://127.0.0.1:1")
    assert config.router.allow_anonymous is anonymous


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    held = lock(state)
    with pytest.raises(CommandError, match="another"):
        lock(state)
    os.close(held)
    os.close(lock(state))


def test_damaged_and_missing_keys_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no cluster"):
        read_keys(tmp_path)
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(CommandError, match="damaged"):
        read_keys(tmp_path)


def test_a_folder_of_somebody_else_is_left_as_it_was(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CommandError, match=r"thesis\.txt"):
        open_state(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_state_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CommandError, match="can't use the state folder"):
            open_state(folder)
        with pytest.raises(CommandError, match="no cluster"):
            read_keys(folder)


@pytest.mark.parametrize("host", ["203.0.113.1", "fe80::1%nosuch"])
def test_where_nobody_can_listen_another_host_is_asked_for(host: str) -> None:
    with pytest.raises(CommandError, match="--host"):
        check_port_free(host, 9)


def test_where_somebody_listens_another_port_is_asked_for() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CommandError, match="--port"),
    ):
        check_port_free("127.0.0.1", taken.getsockname()[1])


async def test_a_cluster_started_twice_is_told_so_though_its_port_is_taken_too(
    tmp_path: Path,
) -> None:
    held = lock(open_state(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        twice = dataclasses.replace(options(tmp_path), port=taken.getsockname()[1])
        with pytest.raises(CommandError, match=r"another `warmroute up`.*--state"):
            await LocalCluster(twice, print).__aenter__()
    os.close(held)


def test_a_cluster_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    config = ClusterConfig(secret="5a" * 32, model=ModelConfig(path="m.gguf"))
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(config))
    assert load_cluster(file, environ={}) == config


def test_servers_of_other_kinds_share_what_the_replicas_say(tmp_path: Path) -> None:
    options = options_of(
        [
            *("--replicas", "0", "--backend", "http://127.0.0.1:8100", "--backend-model", "up"),
            *("--model", str(write_tiny_gguf(tmp_path / "m.gguf"))),
            *("--backend", "http://127.0.0.1:8101", "--block-tokens", "32", "--bridge"),
            "--no-cache-salt",
        ]
    )
    config = cluster_config(options, open_state(tmp_path / "state"), "nats://127.0.0.1:1")
    assert [backend.id for backend in config.backends] == ["b0", "b1"]
    assert {backend.block_tokens for backend in config.backends} == {32}
    assert {backend.events for backend in config.backends} == {"bridge"}
    assert not any(backend.cache_salt for backend in config.backends)
    assert config.replicas == ()


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["--replicas", "0"], "needs a --backend"), (["--backend", "file:///x"], "--backend: ")],
)
def test_what_no_backend_can_be_is_refused(flags: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        options_of(flags)
