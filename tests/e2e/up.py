"""`warmroute up` as a user starts it: a process whose output is read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S = 120.0
COMMAND = (sys.executable, "-m", "tools.cli", "up")


class Up:
    """A running `warmroute up`; `url` and `key` come from what it printed."""

    def __init__(self, state: Path, *flags: str) -> None:
        self.state = state
        self.seen_first: dict[str, Any] = {}
        self._lines: list[str] = []
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [*COMMAND, "--state", str(state), "--kv-bytes", str(16 << 20), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if "Ctrl-C stops" in line:
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return "".join(self._lines)

    def wait_ready(self) -> Up:
        """Until the ready message; fails with the output."""
        assert self._ready.wait(START_S), self.output
        assert "warmroute is up" in self.output, self.output + self.logs()
        return self

    def look(self) -> None:
        """Keep what it tells now, before anybody has asked it for anything."""
        self.seen_first = {path: self.get_json(path) for path in ("/ready", "/router/replicas")}

    def logs(self) -> str:
        """The ends of the children's logs, for failure messages."""
        files = sorted((self.state / "logs").glob("*.log"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    @property
    def url(self) -> str:
        """The gateway's address."""
        match = re.search(r"warmroute is up: (\S+)", self.output)
        assert match
        return match[1]

    @property
    def key(self) -> str:
        """The API key of the default tenant."""
        match = re.search(r"Bearer (\S+?)'", self.output)
        assert match
        return match[1]

    def call(
        self, method: str, path: str, body: bytes | None = None, key: str = ""
    ) -> tuple[int, str]:
        """One plain HTTP request: status and body."""
        request = urllib.request.Request(f"{self.url}{path}", data=body, method=method)
        request.add_header("Content-Type", "application/json")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get_json(self, path: str) -> Any:
        """A GET that must succeed."""
        status, body = self.call("GET", path)
        assert status == 200, body
        return json.loads(body)

    def children(self) -> list[int]:
        """Process ids below it, at any depth."""
        return descendants(self.process.pid)

    def interrupt(self, timeout_s: float = 40.0) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Stop it, however it stands."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, by /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
