"""Small blocks out of Valkey by our client, beside the same bytes out of an LMCache server by its
own: 24 KiB, one after the other, in turns. Needs an environment with lmcache (its server takes
seconds to start), which WARMROUTE_LMCACHE_PYTHON names.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from kvstore.remote.endpoint import Endpoint
from kvstore.remote.lmcache import sidecar
from kvstore.remote.resp import RespConnection
from kvstore.remote.server import EmbeddedValkey
from tools.bench.kv.valkey import SMALL_BYTES, get_values, put_values
from tools.bench.peers import free_port
from tools.errors import CommandError

PYTHON_ENV = "WARMROUTE_LMCACHE_PYTHON"
ROUNDS = 20
GETS = 10
READY_S = 90.0
_KEY = b"bench small key!"

CLIENT = """
import runpy, sys, time
words = runpy.run_path(sys.argv[1])
until = time.monotonic() + float(sys.argv[5])
while True:
    try:
        server = words["Server"](sys.argv[2], 0)
        break
    except words["ServerGoneError"]:
        if time.monotonic() > until:
            raise
        time.sleep(0.2)
key, size = bytes.fromhex(sys.argv[3]), int(sys.argv[4])
server.write(key, memoryview(bytes(size)))
room = bytearray(size)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        parts, _, held = server.read(key, size)
        at = 0
        for part in parts:
            room[at : at + len(part)] = part
            at += len(part)
        server.release(held)
    print(time.perf_counter() - began, flush=True)
"""
"""In LMCache's Python: lookup, retrieve out of shared memory, and the session's end, as its own
adapters do it."""


def measure() -> dict[str, float]:
    """`valkey_over_lmcache`: how many times more of our gets fit into a second. Raises
    CommandError without such an environment."""
    python = os.environ.get(PYTHON_ENV, "")
    if not python:
        raise CommandError(f"lmcache is missing: {PYTHON_ENV} names a Python that has it")
    with tempfile.TemporaryDirectory() as folder, _theirs(Path(python), Path(folder)) as ask:
        valkey = EmbeddedValkey(Path(folder), 64 << 20)
        valkey.start()
        try:
            until = time.monotonic() + READY_S
            with closing(RespConnection(Endpoint.from_url(valkey.url), until)) as ours:
                rooms = [memoryview(bytearray(SMALL_BYTES))]
                put_values(ours, rooms[0], count=1)
                pairs = [(_ours_s(ours, rooms), ask()) for _ in range(ROUNDS + 1)][1:]
        finally:
            valkey.stop()
    return {
        "valkey_over_lmcache": median(theirs / own for own, theirs in pairs),
        "valkey_get_us": 1e6 / GETS * median(own for own, _ in pairs),
        "lmcache_get_us": 1e6 / GETS * median(theirs for _, theirs in pairs),
    }


def _ours_s(client: RespConnection, rooms: list[memoryview]) -> float:
    began = time.perf_counter()
    for _ in range(GETS):
        get_values(client, rooms)
    return time.perf_counter() - began


@contextmanager
def _theirs(python: Path, folder: Path) -> Iterator[Callable[[], float]]:
    """Asks for GETS gets: the seconds that they took."""
    port, http_port = free_port(), free_port()
    words = f"--host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http_port}"
    words += f" --shm-name wrbench{port} --supported-transfer-mode engine_driven --l1-size-gb 1"
    words += " --no-l1-use-lazy --eviction-policy LRU"
    environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    with (folder / "lmcache.log").open("wb") as log:
        server = subprocess.Popen(
            [str(python.parent / "lmcache"), "server", *words.split()],
            stdout=log,
            stderr=log,
            env=environ,
        )
        client = subprocess.Popen(
            [
                *(str(python), "-I", "-c", CLIENT, sidecar.__file__, f"tcp://127.0.0.1:{port}"),
                *(_KEY.hex(), str(SMALL_BYTES), str(READY_S)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        asked, answers = client.stdin, client.stdout

        def ask() -> float:
            asked.write(f"{GETS}\n")
            asked.flush()
            line = answers.readline()
            if not line:
                end = (folder / "lmcache.log").read_text()[-400:]
                raise CommandError(f"LMCache's client ended: {end}")
            return float(line)

        try:
            yield ask
        finally:
            for process in (client, server):
                process.terminate()
                process.wait(20)
