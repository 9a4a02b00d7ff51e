"""Blocks pulled from a peer beside a bare socket copy: same sizes, two processes each, in turns."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median

from kvstore.peer.client import PeerAddress, peer_tier
from kvstore.peer.server import PeerServer
from kvstore.tier import Read, Status, Tier
from tools.bench.kv.turns import in_turns, timed

HOST = "127.0.0.1"
BLOCK_BYTES = 1024 * 1024
SMALL_BYTES = 24 * 1024
BLOCKS = 64
ROUNDS = 9
SECRET = bytes(32)
DEADLINE_S = 60.0
HEADER_BYTES = 500


@dataclass(frozen=True, slots=True)
class _Held:
    header: bytes
    payload: memoryview


class _Endless:
    """Has every block, always the same one."""

    def __init__(self, size: int) -> None:
        self._block = _Held(bytes(HEADER_BYTES), memoryview(os.urandom(size)))

    def lease(self, keys: object) -> list[_Held]:
        return [self._block] * len(keys)  # type: ignore[arg-type]

    def release(self, blocks: object) -> None:
        pass


def measure() -> dict[str, float]:
    """`over_socket`: our bandwidth divided by the bare copy's at 1 MiB; latencies of small ones."""
    with (
        _child("bare", BLOCK_BYTES) as bare,
        _child("peer", BLOCK_BYTES) as port,
        closing(_tier(port)) as tier,
        socket.create_connection((HOST, bare)) as plain,
    ):
        pairs = in_turns(
            lambda: _pull(tier, BLOCKS, BLOCK_BYTES),
            lambda: _copy(plain, BLOCKS, BLOCK_BYTES),
            ROUNDS,
        )
    with _child("peer", SMALL_BYTES) as port, closing(_tier(port)) as tier:
        _pull(tier, 1, SMALL_BYTES)
        small_us = 1e6 * median(timed(lambda: _pull(tier, 1, SMALL_BYTES)) for _ in range(200))
    moved = BLOCKS * BLOCK_BYTES / 1e9
    return {
        "over_socket": median(base / ours for ours, base in pairs),
        "gb_s": moved / median(ours for ours, _ in pairs),
        "socket_gb_s": moved / median(base for _, base in pairs),
        "small_get_us": small_us,
    }


def _tier(port: int) -> Tier:
    return peer_tier(PeerAddress(HOST, port), SECRET)


_ROOMS = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(BLOCKS)]


def _pull(tier: Tier, count: int, size: int) -> None:
    reads = [Read(bytes(16), room[:size]) for room in _ROOMS[:count]]
    outcomes = tier.get(reads, time.monotonic() + DEADLINE_S).result(DEADLINE_S)
    assert all(outcome.status is Status.HIT for outcome in outcomes)


def _copy(plain: socket.socket, count: int, size: int) -> None:
    plain.sendall(bytes([count]))
    for room in _ROOMS[:count]:
        got = 0
        while got < size:
            got += plain.recv_into(room[got:size])


@contextmanager
def _child(kind: str, size: int) -> Iterator[int]:
    command = [sys.executable, "-m", __name__, kind, str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def _serve_bare(size: int) -> None:
    data = os.urandom(size)  # not zeros: those would be one page, always in the cache
    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        reader, _ = listener.accept()
        with reader:
            reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while count := reader.recv(1):
                for _ in range(count[0]):
                    reader.sendall(data)


def _serve_peer(size: int) -> None:
    server = PeerServer(_Endless(size), SECRET)
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"bare": _serve_bare, "peer": _serve_peer}[sys.argv[1]](int(sys.argv[2]))
