"""`warmroute kv` against a real daemon with real blocks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec import structs

from configs.load import load_cluster, to_toml
from configs.schema import ClusterConfig, KvConfig, ModelConfig, RouterConfig, TenantConfig
from events.secrets import block_mac_key
from kvstore.block import decode, encode
from kvstore.identity import BlockIdentity
from kvstore.kvd.client import Kvd, open_tier
from kvstore.remote.build import build_tier
from kvstore.remote.server import EmbeddedValkey
from router.tenancy.tenants import scope_salt
from tests.kvstore.batches import put, writes_of
from tests.kvstore.blocks import CLUSTER_KEY, LAYOUT, run_of
from tests.kvstore.kvd.daemon import Daemon
from tools.cli import main

MINE = scope_salt(CLUSTER_KEY, "mine", "private")
GROUP = scope_salt(CLUSTER_KEY, "theirs", "group:g")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state")
    config = ClusterConfig(
        secret=CLUSTER_KEY.hex(),
        model=ModelConfig(path="m"),
        kv=KvConfig(host=str(folder / "kvd.sock")),
        tenants=(TenantConfig(name="theirs", key_sha256=(), scope="group:g"),),
    )
    (folder / "cluster.toml").write_text(to_toml(config))
    with Daemon(folder / "kvd.sock"):
        yield folder


@pytest.fixture
def blocks(state: Path) -> Iterator[list[BlockIdentity]]:
    """Two of one tenant, three of another, one public; nothing else."""
    tier = open_tier(state / "kvd.sock", "writer")
    found = [*run_of(2, salt=MINE), *run_of(3, salt=GROUP), *run_of(1, salt=b"")]
    put(tier, writes_of(found))
    yield found
    tier.close()
    assert main(["kv", "flush", "--state", str(state)]) == 0


def kv(
    state: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, object]]:
    status = main(["kv", *words, "--state", str(state), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_stats_say_what_each_tenant_takes(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    _, stats = kv(state, capsys, "stats")
    assert stats["blocks"] == len(blocks)
    scopes = stats["scopes"]
    assert isinstance(scopes, list)
    assert sorted(scope["blocks"] for scope in scopes) == [1, 2, 3]
    assert main(["kv", "stats", "--state", str(state)]) == 0
    shown = capsys.readouterr().out
    assert "public" in shown
    assert "6 blocks" in shown


def test_inspect_lists_headers_and_never_tokens(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["kv", "inspect", "--state", str(state), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [block["key"] for block in shown] == sorted(block.key.hex() for block in blocks)
    assert all("token" not in name or name == "tokens" for name in shown[0])
    assert {block["tokens"] for block in shown} == {LAYOUT.block_tokens}
    chosen = blocks[3].key.hex()
    assert main(["kv", "inspect", chosen[:10], "--state", str(state), "--json"]) == 0
    assert [block["index"] for block in json.loads(capsys.readouterr().out)] == [blocks[3].index]
    assert main(["kv", "inspect", "--limit", "2", "--state", str(state)]) == 0
    assert capsys.readouterr().out.count("bfloat16") == 2


def test_verify_finds_and_removes_a_block_that_was_spoilt(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kv(state, capsys, "verify") == (0, {"right": 6, "wrong": {}})
    deadline = time.monotonic() + 10
    control = Kvd(state / "kvd.sock", "spoiler").connect("x", deadline)
    (opened,) = control.open([blocks[2].key], deadline)
    control.segment.slot(opened.place.offset, LAYOUT.payload_bytes)[77] ^= 1
    control.close()
    assert kv(state, capsys, "verify") == (1, {"right": 5, "wrong": {"payload": 1}})
    assert main(["kv", "verify", "--state", str(state)]) == 0
    assert capsys.readouterr().out == "5 blocks are right; wrong and removed: none\n"


def test_flush_takes_one_tenants_blocks(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kv(state, capsys, "flush", "--tenant", "theirs") == (0, {"removed": 3})
    assert kv(state, capsys, "flush", "--tenant", "mine") == (0, {"removed": 2})
    assert kv(state, capsys, "flush") == (0, {"removed": 1})
    assert main(["kv", "flush", "--tenant", "theirs", "--state", str(state)]) == 0
    assert "0 blocks removed, of tenant 'theirs' and its group:g" in capsys.readouterr().out


def test_flush_takes_a_tenants_blocks_out_of_the_store_for_all_hosts(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    server = EmbeddedValkey(state / "valkey", 64 << 20)
    server.start()
    try:
        with closing(build_tier(server.url, secret=CLUSTER_KEY)) as store:
            put(store, writes_of(blocks))
            told = {"removed": 3, "removed_remote": 3}
            assert kv(state, capsys, "flush", "--tenant", "theirs") == (0, told)
            there = [store.exists_prefix([of.key], time.monotonic() + 10) for of in blocks]
            assert there == [1, 1, 0, 0, 0, 1]
        server.stop()
        assert main(["kv", "flush", "--tenant", "mine", "--state", str(state)]) == 1
        assert "does not answer" in capsys.readouterr().err
    finally:
        server.stop()
        (state / "valkey" / "valkey.conf").unlink()


def test_K5_flush_takes_all_that_the_cluster_ever_wrote_out_of_the_store_for_all_hosts(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    """A former life's blocks too, which no replica knows of any more; nobody else's."""
    server = EmbeddedValkey(state / "valkey", 64 << 20)
    server.start()
    try:
        with closing(build_tier(server.url, secret=CLUSTER_KEY)) as store:
            keys = [block_mac_key(CLUSTER_KEY)] * 4 + [block_mac_key(bytes(32))] * 2
            for write, key in zip(writes_of(blocks), keys, strict=True):
                header = encode(decode(bytes(write.header)), key)
                put(store, [replace(write, header=header)])
            told = {"removed": 6, "removed_remote": 4}
            assert kv(state, capsys, "flush") == (0, told)
            there = [store.exists_prefix([of.key], time.monotonic() + 10) for of in blocks]
            assert there == [0, 0, 0, 0, 1, 1]
    finally:
        server.stop()
        (state / "valkey" / "valkey.conf").unlink()


class Gateway(BaseHTTPRequestHandler):
    """One that was told of a tenant which is not in the cluster file."""

    def do_GET(self) -> None:
        known = self.path == "/router/tenants" and "admin" in self.headers["Authorization"]
        told = {"tenants": [{"name": "put", "scope": "group:g"}]} if known else {}
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_flush_takes_the_blocks_of_a_tenant_that_only_the_gateway_knows(
    state: Path, blocks: list[BlockIdentity], capsys: pytest.CaptureFixture[str]
) -> None:
    file, keys = state / "cluster.toml", state / "keys.json"
    before = file.read_text()
    assert main(["kv", "flush", "--tenant", "put", "--state", str(state)]) == 1
    capsys.readouterr()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            router = RouterConfig(port=server.server_port)
            file.write_text(to_toml(structs.replace(load_cluster(file, {}), router=router)))
            keys.write_text('{"secret": "s", "admin_key": "admin", "api_key": "k"}')
            assert kv(state, capsys, "flush", "--tenant", "put") == (0, {"removed": 3})
        finally:
            server.shutdown()
            file.write_text(before)
            keys.unlink()


def test_flush_of_a_tenant_that_nobody_knows_fails(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "flush", "--tenant", "nosuch", "--state", str(state)]) == 1
    assert "has such a tenant" in capsys.readouterr().err


def test_where_there_is_no_daemon_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "stats", "--socket", str(tmp_path / "none")]) == 1
    told = capsys.readouterr().err
    assert "no kvd at" in told
    assert "`warmroute up` starts one" in told
    assert main(["kv", "flush", "--state", str(tmp_path)]) == 1
    assert "no cluster in" in capsys.readouterr().err
    config = ClusterConfig(secret=CLUSTER_KEY.hex(), model=ModelConfig(path="m"))
    (tmp_path / "cluster.toml").write_text(to_toml(config))
    assert main(["kv", "stats", "--state", str(tmp_path)]) == 1
    assert "this cluster has no kvd" in capsys.readouterr().err
