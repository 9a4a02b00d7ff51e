"""Valkey's own ways: chains renewed as a whole, a full server, a real cluster's redirections."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from events.parent import dying_with_us
from kvstore.remote.endpoint import Endpoint
from kvstore.remote.nodes import Doors, Nodes, _slot
from kvstore.remote.resp import RespConnection
from kvstore.remote.server import EmbeddedValkey, find_server
from kvstore.remote.valkey import PREFIX, valkey_tier
from kvstore.tier import Health, Tier
from tests.kvstore.conformance.backend import HOST, MIB, free_port
from tests.kvstore.conformance.blocks import LARGE, Block, chain_of, reads_into, verdict
from tests.waiting import wait_until


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def seen(tier: Tier, blocks: list[Block]) -> list[str]:
    rooms = [block.room() for block in blocks]
    outcomes = tier.get(reads_into(blocks, rooms), soon()).result(10)
    return [verdict(*each) for each in zip(blocks, outcomes, rooms, strict=True)]


def put(tier: Tier, blocks: list[Block], ttl_s: float | None = None) -> list[str]:
    outcomes = tier.put([block.write(ttl_s) for block in blocks], soon()).result(10)
    return [outcome.reason or outcome.status.value for outcome in outcomes]


def name(block: Block) -> bytes:
    return PREFIX + block.key.hex().encode()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path, 8 * MIB)
    server.start()
    yield server
    server.stop()


def test_a_chain_renews_its_time_as_a_whole(valkey: EmbeddedValkey) -> None:
    endpoint, chain = Endpoint.from_url(valkey.url), chain_of(4, 1)
    with (
        closing(valkey_tier(endpoint, ttl_s=1_000.0)) as tier,
        closing(RespConnection(endpoint, soon())) as client,
    ):
        put(tier, chain, ttl_s=5.0)
        left = [client.call(b"PTTL", name(block), deadline=soon()) for block in chain]
        assert all(0 < each <= 5_000 for each in left)
        assert tier.exists_prefix([block.key for block in chain], soon()) == 4
        left = [client.call(b"PTTL", name(block), deadline=soon()) for block in chain]
        assert all(5_000 < each <= 1_000_000 for each in left)
        client.call(b"DEL", name(chain[1]), deadline=soon())
        assert tier.exists_prefix([block.key for block in chain], soon()) == 1


def test_blocks_go_to_the_database_that_the_url_names(valkey: EmbeddedValkey) -> None:
    there, chain = Endpoint.from_url(valkey.url + "/3"), chain_of(2, 8)
    with closing(valkey_tier(there)) as tier:
        assert put(tier, chain) == ["stored"] * 2
        assert seen(tier, chain) == ["good"] * 2
    for endpoint, count in ((Endpoint.from_url(valkey.url), 0), (there, 2)):
        with closing(RespConnection(endpoint, soon())) as client:
            assert client.call(b"DBSIZE", deadline=soon()) == count


def test_a_full_server_is_a_failure_by_name(valkey: EmbeddedValkey) -> None:
    endpoint = Endpoint.from_url(valkey.url)
    with (
        closing(valkey_tier(endpoint)) as tier,
        closing(RespConnection(endpoint, soon())) as client,
    ):
        client.call(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction", deadline=soon())
        outcomes = put(tier, chain_of(12, 2, kv=LARGE))
        assert set(outcomes) == {"stored", "full"}
        assert tier.health() is Health.OK


def test_the_embedded_server_evicts_and_keeps_its_password(valkey: EmbeddedValkey) -> None:
    assert "requirepass" not in repr(valkey)
    with closing(valkey_tier(Endpoint.from_url(valkey.url))) as tier:
        assert set(put(tier, chain_of(12, 3, kv=LARGE))) == {"stored"}
    url = valkey.url
    valkey.stop()
    valkey.start()
    assert valkey.url == url


class Cluster:
    """Two masters with half of the slots each, started from the binary of the embedded server."""

    def __init__(self, folder: Path) -> None:
        self.ports = [free_port(), free_port()]
        self._processes = []
        for port in self.ports:
            place = folder / str(port)
            place.mkdir()
            options = {
                "bind": HOST,
                "port": port,
                "cluster-enabled": "yes",
                "save": "",
                "dir": place,
                "cluster-node-timeout": 2_000,
                "cluster-port": free_port(),
                "logfile": "log",
            }
            flags = [
                f"--{key}={value}" if value else f'--{key}=""' for key, value in options.items()
            ]
            words = [word for flag in flags for word in flag.split("=", 1)]
            command = dying_with_us([find_server(), *words])
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        self.clients = [self._connected(port) for port in self.ports]
        halves = ((0, 8_191), (8_192, 16_383))
        for client, (first, last) in zip(self.clients, halves, strict=True):
            slots = (b"%d" % first, b"%d" % last)
            client.call(b"CLUSTER", b"ADDSLOTSRANGE", *slots, deadline=soon())
        bus = options["cluster-port"]
        meet = (HOST.encode(), b"%d" % self.ports[1], b"%d" % bus)
        self.clients[0].call(b"CLUSTER", b"MEET", *meet, deadline=soon())
        for client in self.clients:
            self._wait_ok(client)

    @staticmethod
    def _connected(port: int) -> RespConnection:
        end = soon()
        while True:
            with suppress(ConnectionRefusedError):
                return RespConnection(Endpoint(HOST, port), soon())
            assert time.monotonic() < end
            time.sleep(0.01)

    @staticmethod
    def _wait_ok(client: RespConnection) -> None:
        end = soon(30)
        while b"cluster_state:ok" not in client.call(b"CLUSTER", b"INFO", deadline=soon()):
            assert time.monotonic() < end
            time.sleep(0.02)

    def leaves(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_cluster_is_followed_and_purged_on_every_node(tmp_path: Path) -> None:
    with closing(Cluster(tmp_path)) as cluster:
        for port in cluster.ports:
            chain = chain_of(24, port, kv=LARGE)
            with closing(valkey_tier(Endpoint(HOST, port))) as tier:
                assert put(tier, chain) == ["stored"] * 24
                assert seen(tier, chain) == ["good"] * 24
                assert tier.exists_prefix([block.key for block in chain], soon()) == 24
                sizes = [client.call(b"DBSIZE", deadline=soon()) for client in cluster.clients]
                assert all(sizes)
                assert tier.purge(chain[0].identity.scope) == 24


@pytest.mark.slow
def test_moved_and_ask_lead_to_the_node_that_has_it(tmp_path: Path) -> None:
    with closing(Cluster(tmp_path)) as cluster:
        one, two = cluster.clients
        [block] = chain_of(1, 77)
        slot = b"%d" % one.call(b"CLUSTER", b"KEYSLOT", name(block), deadline=soon())
        ids = [client.call(b"CLUSTER", b"MYID", deadline=soon()) for client in (one, two)]
        here, there = (0, 1) if int(slot) < 8_192 else (1, 0)
        source, target = cluster.clients[here], cluster.clients[there]
        with closing(valkey_tier(Endpoint(HOST, cluster.ports[here]))) as tier:
            assert put(tier, [block]) == ["stored"]
            # On its way, half moved: the source says ASK for what it has no more.
            importing = (b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", ids[here])
            migrating = (b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", ids[there])
            target.call(*importing, deadline=soon())
            source.call(*migrating, deadline=soon())
            goal = (HOST.encode(), b"%d" % cluster.ports[there])
            source.call(b"MIGRATE", *goal, name(block), b"0", b"5000", deadline=soon())
            assert seen(tier, [block]) == ["good"]
            for client in (target, source):
                client.call(b"CLUSTER", b"SETSLOT", slot, b"NODE", ids[there], deadline=soon())
            # Moved for good: MOVED, learnt once.
            assert seen(tier, [block]) == ["good"]
            assert tier.exists_prefix([block.key], soon()) == 1


@pytest.mark.slow
def test_a_cluster_is_found_again_though_the_node_that_was_named_has_left(tmp_path: Path) -> None:
    chain = chain_of(24, 9, kv=LARGE)
    with closing(Cluster(tmp_path)) as cluster:
        for client in cluster.clients:
            partial_too = (b"cluster-require-full-coverage", b"no", b"requirepass", b"pw")
            client.call(b"CONFIG", b"SET", *partial_too, deadline=soon())
        named = Endpoint(HOST, cluster.ports[0], password="pw")
        with closing(valkey_tier(named)) as tier:
            assert put(tier, chain) == ["stored"] * 24
            assert seen(tier, chain) == ["good"] * 24
            cluster.leaves(0)
            there = [block for block in chain if _slot(name(block)) > 8_191]
            assert "away" in seen(tier, chain)
            wait_until(lambda: seen(tier, there) == ["good"] * len(there))


def test_nodes_that_send_in_circles_are_left(valkey: EmbeddedValkey) -> None:
    import hiredis

    with closing(Nodes(Doors(Endpoint.from_url(valkey.url)), soon())) as nodes:
        there = f"MOVED 7 {HOST}:{valkey.port}"
        with pytest.raises(OSError, match="circles"):
            nodes.spread([b"k"], lambda *_: {0: hiredis.ReplyError(there)}, soon())
        refused = nodes.spread([b"k"], lambda *_: {0: hiredis.ReplyError("OOM full")}, soon())
        assert str(refused[0]) == "OOM full"
