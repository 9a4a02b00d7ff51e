"""One store that tier tests run against, and what may be done to it behind the tier's back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from kvstore.connector import Limits
from kvstore.tier import Tier
from tests.kvstore.conformance.blocks import Block
from tests.processes import go_on, stand_still

SECRET = bytes(range(100, 132))
HOST = "127.0.0.1"
MIB = 1024 * 1024
LIMITS = Limits(readers=2)


class Backend:
    """One store, and what can be done to it: server (a process that can be stopped and killed), tcp
    (reached through a port), raw (bytes can be changed), purge, ttl; read_only is what it is."""

    name = ""
    can: frozenset[str] = frozenset()
    slow = False

    def __init__(self, folder: Path) -> None:
        """Start what it needs; `folder` is its own."""

    def open(self) -> Tier:
        """A new tier on it."""
        raise NotImplementedError

    def release(self, tier: Tier) -> None:
        """Done with a tier that `open` gave."""
        tier.close()

    def close(self) -> None:
        """Ends what it started."""

    def store(self, blocks: Sequence[Block]) -> None:
        """Put blocks there, through a tier of its own."""
        tier = self.open()
        try:
            tier.put([block.write() for block in blocks], monotonic() + 20).result(20)
        finally:
            self.release(tier)

    def overwrite(self, key: bytes, value: bytes) -> None:
        """Behind the tier's back."""
        raise NotImplementedError

    def drop(self, key: bytes) -> None:
        """Likewise."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Of the server."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """Of the server."""
        raise NotImplementedError

    def restart(self) -> None:
        """kill -9, then start again at the same place."""
        raise NotImplementedError

    def at(self, port: int) -> Tier:
        """A new tier that reaches the server through another port (a proxy's)."""
        raise NotImplementedError

    def stall(self) -> None:
        stand_still(self.pid)

    def resume(self) -> None:
        go_on(self.pid)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Child:
    """A server of ours, told its port on start and saying it on stdout."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self.port = 0
        self.start()

    def start(self) -> None:
        self.port = self.port or free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(self.port), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        )
        assert self.process.stdout is not None
        assert int(self.process.stdout.readline()) == self.port

    def tell(self, **order: str) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
