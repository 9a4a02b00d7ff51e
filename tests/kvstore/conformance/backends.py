"""The stores that every tier test runs against: real files, servers and processes."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic

import obstore

from configs.schema import TlsConfig
from events.tls import client_context
from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.segment import Segment
from kvstore.arena.tier import ArenaTier
from kvstore.kvd.client import open_tier
from kvstore.peer.client import PeerAddress, peer_tier
from kvstore.remote.endpoint import Endpoint
from kvstore.remote.file import FileStore, file_tier
from kvstore.remote.lmcache.tier import LMCacheAddress, lmcache_tier
from kvstore.remote.resp import RespConnection
from kvstore.remote.s3 import Bucket, open_store, s3_tier
from kvstore.remote.server import EmbeddedValkey
from kvstore.remote.valkey import valkey_tier
from kvstore.tier import Tier
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.papers import make_papers
from tests.kvstore.conformance.backend import HOST, LIMITS, MIB, SECRET, Backend, Child, free_port
from tests.kvstore.conformance.blocks import Block, chain_of
from tests.kvstore.kvd.daemon import Daemon


class MemoryBackend(Backend):
    name = "memory"
    can = frozenset({"purge", "ttl"})

    def __init__(self, folder: Path) -> None:
        self._tier = MemoryTier(64 * MIB)

    def open(self) -> Tier:
        return self._tier

    def release(self, tier: Tier) -> None:
        """It is the store itself."""


class ArenaBackend(Backend):
    name = "arena"
    can = frozenset({"purge", "ttl"})

    def __init__(self, folder: Path) -> None:
        self._arena = Arena(Segment.private(32 * MIB), ArenaLimits())

    def open(self) -> Tier:
        return ArenaTier.local(self._arena)


class KvdBackend(Backend):
    name = "kvd"
    can = frozenset({"server", "purge", "ttl"})

    def __init__(self, folder: Path) -> None:
        self._daemon = Daemon(folder / "kvd.sock", mib=32)
        self._daemon.start()

    def open(self) -> Tier:
        return open_tier(self._daemon.path, "conformance")

    def close(self) -> None:
        self._daemon.stop()

    @property
    def pid(self) -> int:
        return self._daemon.pid

    def restart(self) -> None:
        self._daemon.stop(signal.SIGKILL)
        self._daemon.start()


class FileBackend(Backend):
    name = "file"
    can = frozenset({"raw", "purge", "ttl"})

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "blocks"
        self._store = FileStore(self._folder, 1024 * MIB, 3_600.0, lambda: 0.0)

    def open(self) -> Tier:
        return file_tier(self._folder, 1024 * MIB, limits=LIMITS)

    def overwrite(self, key: bytes, value: bytes) -> None:
        path = self._store.path(key)
        stat = path.stat()
        aside = path.with_suffix(".aside")
        aside.write_bytes(value)
        os.utime(aside, (stat.st_atime, stat.st_mtime))
        aside.rename(path)

    def drop(self, key: bytes) -> None:
        self._store.path(key).unlink()


class ValkeyBackend(Backend):
    name = "valkey"
    can = frozenset({"raw", "server", "tcp", "purge", "ttl"})

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedValkey(folder, 512 * MIB)
        self._server.start()

    def open(self) -> Tier:
        return self.at(self._server.port)

    def at(self, port: int) -> Tier:
        endpoint = Endpoint.from_url(self._server.url)
        return valkey_tier(endpoint.at(HOST, port), limits=LIMITS)

    def close(self) -> None:
        self._server.stop()

    def overwrite(self, key: bytes, value: bytes) -> None:
        self._call(b"SET", b"wr1:" + key.hex().encode(), value)

    def drop(self, key: bytes) -> None:
        self._call(b"DEL", b"wr1:" + key.hex().encode())

    def _call(self, *command: bytes) -> None:
        until = monotonic() + 5
        with closing(RespConnection(Endpoint.from_url(self._server.url), until)) as client:
            client.call(*command, deadline=until)

    @property
    def pid(self) -> int:
        assert self._server.pid is not None
        return self._server.pid

    @property
    def port(self) -> int:
        return self._server.port

    def restart(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._server.stop()
        self._server.start()


class S3Backend(Backend):
    name = "s3"
    can = frozenset({"raw", "server", "tcp", "purge"})
    slow = True  # a Python server: 10 ms a request

    def __init__(self, folder: Path) -> None:
        self._child = Child("tests.kvstore.conformance.s3_child")

    def _bucket(self, port: int) -> Bucket:
        return Bucket("blocks", endpoint=f"http://{HOST}:{port}", region="us-east-1")

    def open(self) -> Tier:
        return self.at(self._child.port)

    def at(self, port: int) -> Tier:
        return s3_tier(self._bucket(port), limits=LIMITS)

    def close(self) -> None:
        self._child.kill()

    def overwrite(self, key: bytes, value: bytes) -> None:
        obstore.put(open_store(self._bucket(self.port)), self._name(key), value)

    def drop(self, key: bytes) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(open_store(self._bucket(self.port)), self._name(key))

    @staticmethod
    def _name(key: bytes) -> str:
        return f"{key.hex()[:2]}/{key.hex()}.kvb"

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def port(self) -> int:
        return self._child.port

    def restart(self) -> None:
        self._child.kill()
        self._child.start()


class PeerBackend(Backend):
    name = "peer"
    can = frozenset({"raw", "server", "tcp", "read_only"})

    def __init__(self, folder: Path) -> None:
        self._papers = self._made(folder)
        files = (self._papers.cert, self._papers.key, self._papers.ca) if self._papers else ()
        self.child = Child("tests.kvstore.conformance.peer_child", SECRET.hex(), *files)

    def _made(self, folder: Path) -> TlsConfig | None:
        """The certificates that it shows, if any."""
        return None

    def open(self) -> Tier:
        return self.at(self.child.port)

    def at(self, port: int) -> Tier:
        tls = client_context(self._papers) if self._papers else None
        return peer_tier(PeerAddress(HOST, port), SECRET, LIMITS, tls)

    def close(self) -> None:
        self.child.kill()

    def store(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._put(block.key, block.header, block.payload)

    def overwrite(self, key: bytes, value: bytes) -> None:
        head = min(int.from_bytes(value[8:12], "little"), len(value))
        self._put(key, value[:head], value[head:])

    def _put(self, key: bytes, header: bytes, payload: bytes) -> None:
        self.child.tell(
            do="put",
            key=key.hex(),
            header=base64.b64encode(header).decode(),
            payload=base64.b64encode(payload).decode(),
        )

    def drop(self, key: bytes) -> None:
        self.child.tell(do="drop", key=key.hex())

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def port(self) -> int:
        return self.child.port

    def restart(self) -> None:
        self.child.kill()
        self.child.start()


class PeerTlsBackend(PeerBackend):
    name = "peer-tls"
    slow = True  # what it has of its own is tested with the peers

    def _made(self, folder: Path) -> TlsConfig | None:
        return make_papers(folder / "papers")


LMCACHE_PYTHON = os.environ.get("WARMROUTE_LMCACHE_PYTHON", "")
"""Of an environment that has lmcache. Without one its server is left out."""


class LMCacheBackend(Backend):
    name = "lmcache"
    can = frozenset({"server"})
    slow = True  # seconds to start, milliseconds a block

    def __init__(self, folder: Path) -> None:
        self._port, self._http_port = free_port(), free_port()
        self._log = (folder / "server.log").open("wb")
        self._start()

    def open(self) -> Tier:
        url = f"lmcache://{HOST}:{self._port}?python={LMCACHE_PYTHON}&http={self._http_port}"
        tier = lmcache_tier(LMCacheAddress.from_url(url), LIMITS)
        [block] = chain_of(1, 0)
        until = monotonic() + 60
        while (outcome := tier.put([block.write()], until).result(60)[0]).reason:
            assert monotonic() < until, outcome
        return tier

    def close(self) -> None:
        self._stop(signal.SIGTERM)
        self._log.close()

    def _start(self) -> None:
        words = f"--host {HOST} --http-host {HOST} --port {self._port}"
        words += f" --http-port {self._http_port} --shm-name wr{self._port}"
        words += " --supported-transfer-mode engine_driven"
        words += " --l1-size-gb 1 --no-l1-use-lazy --eviction-policy LRU"
        program = Path(LMCACHE_PYTHON).parent / "lmcache"
        self._process = subprocess.Popen(
            [str(program), "server", *words.split()],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        )

    def _stop(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(20)

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self._stop(signal.SIGKILL)
        self._start()
        self.release(self.open())


BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        MemoryBackend,
        ArenaBackend,
        KvdBackend,
        FileBackend,
        ValkeyBackend,
        S3Backend,
        PeerBackend,
        PeerTlsBackend,
        *([LMCacheBackend] if LMCACHE_PYTHON else []),
    )
}
