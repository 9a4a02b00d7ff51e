"""A benchmark's processes: what they started ends with them, however they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.child import Child, until

SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

BENCH = """
import sys
from pathlib import Path
from tools.bench.child import Child
with Child([sys.executable, "-c", *sys.argv[2:]], None, Path(sys.argv[1])) as child:
    print(child.line(20)[0], flush=True)
    sys.stdin.read()
"""

FATHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def _gone(pid: int) -> bool:
    """Dead, or dead and not yet asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
def test_a_killed_benchmark_leaves_no_process(tmp_path: Path, deep: bool) -> None:
    started = [FATHER, SLEEPER] if deep else [SLEEPER]
    command = [sys.executable, "-c", BENCH, str(tmp_path / "log"), *started]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        assert not _gone(pid)
        bench.kill()
    until(lambda: _gone(pid), 10, "it did not end")


def test_a_benchmark_that_ends_leaves_no_process(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", FATHER, SLEEPER], None, tmp_path / "log") as child:
        pid = int(child.line(20)[0])
    until(lambda: _gone(pid), 10, "it did not end")
