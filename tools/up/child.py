"""One child process: started so that it can't outlive its parent, watched, stopped for sure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.errors import CommandError

STOP_S = 25.0
"""How long a child may drain before it is killed."""


class SlowStartError(CommandError):
    """It may only need more time."""


class Child:
    """A child of `warmroute up`. It runs in a session of its own, so that Ctrl-C reaches only the
    parent, which then stops the children in order; `--die-with-parent` covers kill -9."""

    def __init__(
        self, name: str, module: str, args: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.environ = {**os.environ, **environ}
        self._command = [sys.executable, "-m", module, *args, "--die-with-parent"]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, timeout_s: float) -> str:
        """Start and wait for its `READY <url>` line; returns the url. Raises CommandError, and
        SlowStartError where it was stopped for taking too long."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready_url()
        except TimeoutError:
            await self.stop()
            raise SlowStartError(
                f"{self.name} was not ready within {timeout_s:.0f} s and was stopped; "
                f"it said last: {self.last_words()}"
            ) from None

    async def _ready_url(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            word, _, url = line.decode(errors="replace").strip().partition(" ")
            if word == "READY":
                return url
        await self._process.wait()
        raise CommandError(f"{self.name} did not start: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of its log, and where that lies."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it said nothing'} (log: {self._log})"

    async def wait(self) -> int:
        """The exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """Drain, then kill; idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """At once; harmless when it is gone."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class RestartBudget:
    """At most `limit` restarts within `window_s`: a child that can't live is given up, loudly."""

    def __init__(self, limit: int = 5, window_s: float = 60.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []

    def take(self) -> bool:
        """Whether one more restart is allowed now."""
        now = time.monotonic()
        self._times = [at for at in self._times if now - at < self._window_s]
        if len(self._times) >= self._limit:
            return False
        self._times.append(now)
        return True
