"""Compiles native kernels once for this machine, and loads them.

An object is named by its sources, its flags and the CPU's features, so that a cache folder shared
by different machines never serves the wrong one. Of several processes that need it one compiles,
beside the target, and renames; the others wait. Knows nothing of what the kernels do.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import mmh3
from numpy.typing import NDArray

log = logging.getLogger(__name__)

_FLAGS = ("-std=gnu++20", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-w")
_COMPILE_TIMEOUT_S = 120.0
_WAIT_S = 3 * _COMPILE_TIMEOUT_S
_LOOK_S = 0.1
_KEPT_OBJECTS = 8
_START = ctypes.c_char * 0


class CompileError(RuntimeError):
    """No compiler, or it refused."""


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU, such as "avx512_bf16"; empty where they can't be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@dataclass(frozen=True, slots=True)
class NativeSource:
    """The C++ files behind one shared object, all in `folder`; `flags` go beside the common ones.

    `headers` are only included by the sources, but a change of them is a change of the object.
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def target(self) -> Path:
        """The object's place in the cache: its name is a digest of all that it depends on."""
        parts = [(self.folder / name).read_bytes() for name in (*self.sources, *self.headers)]
        parts.append(" ".join((*_FLAGS, *self.flags, *sorted(cpu_flags()))).encode())
        return cache_folder() / f"{self.name}-{mmh3.hash_bytes(b'/'.join(parts)).hex()}.so"


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array's first element lies; the array must outlive the call that gets it.
    Quicker than `array.ctypes`, where the array can be written to."""
    if array.flags.writeable:
        return ctypes.addressof(_START.from_buffer(array.data))
    return int(array.ctypes.data)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    given = os.environ.get("WARMROUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given or Path(base, "warmroute")) / "native"


def compile_object(source: NativeSource, target: Path) -> None:
    """Compile the sources, side by side, into `target`. Raises CompileError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise CompileError("no C++ compiler was found")
    flags = (*_FLAGS, *source.flags)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder, name).with_suffix(".o")) for name in source.sources]
        with ThreadPoolExecutor(len(objects)) as pool:
            for done in [
                pool.submit(_run, [compiler, *flags, "-c", str(source.folder / name), "-o", built])
                for name, built in zip(source.sources, objects, strict=True)
            ]:
                done.result()
        linked = str(Path(folder, "linked.so"))
        _run([compiler, *flags, "-shared", *objects, "-o", linked])
        os.replace(linked, target)


def load_object(source: NativeSource, *, quick: bool = False) -> ctypes.CDLL:
    """The kernels, compiled first where the cache lacks them. Raises CompileError.

    `quick`: a call takes microseconds, so it keeps the interpreter's lock: a thread that got it
    meanwhile would keep it for milliseconds."""
    try:
        target = source.target
        if not target.exists():
            with _alone(target.parent):
                _compile_missing(source, target)
        return (ctypes.PyDLL if quick else ctypes.CDLL)(str(target))
    except OSError as error:
        raise CompileError(str(error)) from error


def declare(
    library: ctypes.CDLL, signatures: Mapping[str, Sequence[type]], result: type | None = None
) -> ctypes.CDLL:
    """With argument types by function, so that a wrong call fails in Python."""
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with its process. Raises CompileError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compile.lock").open("w") as lock:
        if not _locked(lock):
            log.info("waiting for another process that compiles native kernels")
            deadline_s = time.monotonic() + _WAIT_S
            while not _locked(lock):
                if time.monotonic() > deadline_s:
                    raise CompileError("another process has been compiling for too long")
                time.sleep(_LOOK_S)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile_missing(source: NativeSource, target: Path) -> None:
    """Compile what nobody else has compiled meanwhile; the lock is held."""
    if target.exists():
        return
    for left in target.parent.glob("tmp*"):  # of a compile that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    log.info("compiling the native %s (a few seconds, once)", source.name)
    compile_object(source, target)
    forget_old(target.parent, source.name)


def forget_old(folder: Path, name: str) -> None:
    """Keep the newest objects; a process that has loaded an older one is not disturbed."""
    objects = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime)
    for path in objects[:-_KEPT_OBJECTS]:
        path.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]}: {error.stderr.strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(str(error)) from error
