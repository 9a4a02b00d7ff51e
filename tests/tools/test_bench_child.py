"""A benchmark's processes: what they started ends with them, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import peers
from tools.bench.child import Child, until

SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

BENCH = """
import sys
from pathlib import Path
from tools.bench.child import Child
with Child([sys.executable, "-c", sys.argv[1]], None, Path(sys.argv[2])) as child:
    print(child.line(20)[0], flush=True)
    sys.stdin.read()
"""

DYNAMO = """
import argparse, asyncio, runpy, sys
script = runpy.run_path(sys.argv[1])
flags = argparse.Namespace(port=1, block_tokens=16, worker_urls=[], kv_events=[])
asyncio.run(script["_frontend"](flags))
"""


def _gone(pid: int) -> bool:
    """Dead, or dead and not yet asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _started_by_one_that_is_killed(code: str, *arguments: str, path: str = "") -> int:
    """Runs the code until it names a process, and kills it."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.getcwd()])}
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    ) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        assert not _gone(pid)
        bench.kill()
    return pid


def test_a_killed_benchmark_leaves_no_process(tmp_path: Path) -> None:
    pid = _started_by_one_that_is_killed(BENCH, SLEEPER, str(tmp_path / "log"))
    until(lambda: _gone(pid), 10, "the child did not end")


def test_a_killed_peer_of_dynamo_leaves_no_frontend(tmp_path: Path) -> None:
    package = tmp_path / "dynamo"
    package.mkdir()
    (package / "frontend.py").write_text(SLEEPER)
    pid = _started_by_one_that_is_killed(DYNAMO, str(peers.DYNAMO), path=str(tmp_path))
    until(lambda: _gone(pid), 10, "the frontend did not end")


def test_a_program_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no program 'nowhere'"):
        Child(["nowhere"], None, tmp_path / "log")
