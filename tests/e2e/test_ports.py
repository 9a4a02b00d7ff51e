"""S1: whatever comes to any port of a cluster, it serves on; nothing dies."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up, alive

COUNT = 10_000
HEAD = b" HTTP/1.1\r\nHost: x\r\n"
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
OPENINGS = (
    b"GET /metrics" + HEAD + b"\r\n",
    b"GET /link" + HEAD + UPGRADE + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n\x82\x7f",
    b"POST /v1/completions" + HEAD + b"Content-Length: 12\r\n\r\n" + b'{"prompt":"a',
    b"CONNECT {}\r\nPUB x 3\r\nabc\r\n",
    b"*2\r\n$4\r\nECHO\r\n$3\r\nabc\r\n",
    b"\x80\x04\x95\0\0\0\0\0\0\0\0.",
)


def listening(pid: int) -> Iterator[int]:
    """Its TCP ports."""
    links = (str(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    sockets = {os.readlink(link) for link in links if os.path.lexists(link)}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].split(":")[1], 16)


def odd(dice: random.Random) -> bytes:
    if dice.random() < 0.2:
        return dice.randbytes(dice.randrange(1, 300))
    opening = bytearray(dice.choice(OPENINGS) + dice.randbytes(dice.randrange(20)))
    for _ in range(dice.randrange(3)):
        opening[dice.randrange(len(opening))] = dice.randrange(256)
    return bytes(opening)


def pester(port: int, count: int) -> None:
    """So many strangers; a tenth of them wait for what is said to them."""
    dice = random.Random(port)
    for _ in range(count):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(odd(dice))
            if dice.random() < 0.1:
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(30)
                while stranger.recv(65_536):
                    pass


@pytest.mark.slow
def test_S1_ten_thousand_strangers_at_every_port(up: Up, client: OpenAI) -> None:
    processes = [up.process.pid, *up.children()]
    ports = {port: pid for pid in processes for port in listening(pid)}
    assert len(ports) >= 4  # the bus, two replicas, the gateway
    for port in ports:
        pester(port, COUNT)
    assert [pid for pid in processes if not alive(pid)] == []
    assert client.completions.create(model=MODEL, prompt="still here", max_tokens=1).choices
    assert "Traceback" not in up.logs()
