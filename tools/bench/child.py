"""A process of a benchmark, on a CPU of its own where asked, and the CPU time that it has used."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tools.errors import CommandError

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
STOP_S = 5.0
MAX_SAID_CHARS = 400

_KEEPER = """
import os, sys
sys.stdin.buffer.read()
os.killpg(int(sys.argv[1]), 9)
"""
"""Its input ends with us, however we end."""


class Child:
    """Use as a context manager. Everything it starts counts as its own, and ends with us."""

    def __init__(
        self,
        command: list[str],
        cpu: int | None,
        log: Path,
        environ: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> None:
        """With `talks` it listens on its standard input. Errors call it by its log's name."""
        self.name = log.stem
        pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*pinned, *command],
                stdout=subprocess.PIPE,
                stderr=sink,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.kill()
        self._keeper.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 15)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._keeper.stdin):
            if pipe is not None:
                pipe.close()

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send it one."""
        self._process.send_signal(number)

    def said(self) -> str:
        """The last line that it wrote on standard error."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-MAX_SAID_CHARS:] if lines else "it said nothing"

    def tell(self, line: bytes) -> None:
        """Say one line to a child that talks. Raises CommandError where it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CommandError(f"{self.name} has ended: {self.said()}") from None

    def answer(self, timeout_s: float) -> bytes:
        """The next line of its output. Raises CommandError where none comes."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line.strip():
            state = "ended" if ready else f"said nothing within {timeout_s:g} s"
            raise CommandError(f"{self.name} {state}: {self.said()}")
        return line

    def line(self, timeout_s: float) -> list[str]:
        """The next line of its output, in words. Raises CommandError where none comes."""
        return self.answer(timeout_s).decode().split()

    def cpu_s(self) -> float:
        """User and system time of the process and of all that it started."""
        return sum(map(_cpu_s, _tree(self._process.pid)))


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _tree(int(child)))]


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return TICK_S * (int(fields[11]) + int(fields[12]))


def python(*arguments: str) -> list[str]:
    """A command that runs a module of ours or of a peer."""
    return [sys.executable, *arguments]


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for what can only be asked again. Raises CommandError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise CommandError(f"{what} within {timeout_s:g} s")
        time.sleep(0.05)
