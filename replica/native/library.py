"""Compiles the native kernels once for this machine, and loads them.

The object is named by its sources, its flags and the CPU's features, so that a cache folder shared
by different machines never serves the wrong one. Concurrent builders are harmless: each compiles
beside the target and renames.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import mmh3

from replica.native.cpu import cpu_flags

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("layers.cpp", "attention.cpp")
_HEADERS = ("vec.h",)
_FLAGS = (
    "-std=gnu++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip
_COMPILE_TIMEOUT_S = 120.0
_KEPT_OBJECTS = 8


class CompileError(RuntimeError):
    """No compiler, or it refused."""


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    given = os.environ.get("WARMROUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given or Path(base, "warmroute")) / "native"


def _name() -> str:
    """The object's file name: a digest of everything that it depends on."""
    parts = [(_FOLDER / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    parts.append(" ".join((*_FLAGS, *sorted(cpu_flags()))).encode())
    return f"kernels-{mmh3.hash_bytes(b'/'.join(parts)).hex()}.so"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]}: {error.stderr.strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(str(error)) from error


def compile_kernels(target: Path) -> None:
    """Compile the sources, side by side, into `target`. Raises CompileError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise CompileError("no C++ compiler was found")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder, name).with_suffix(".o")) for name in _SOURCES]
        with ThreadPoolExecutor(len(_SOURCES)) as pool:
            for done in [
                pool.submit(_run, [compiler, *_FLAGS, "-c", str(_FOLDER / name), "-o", built])
                for name, built in zip(_SOURCES, objects, strict=True)
            ]:
                done.result()
        linked = str(Path(folder, "linked.so"))
        _run([compiler, *_FLAGS, "-shared", *objects, "-o", linked])
        os.replace(linked, target)


def _forget_old(folder: Path) -> None:
    """Keep the newest objects; a process that has loaded an older one is not disturbed."""
    objects = sorted(folder.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime)
    for path in objects[:-_KEPT_OBJECTS]:
        path.unlink(missing_ok=True)


@cache
def load_library() -> ctypes.CDLL:
    """The kernels, compiled first where the cache lacks them. Raises CompileError."""
    target = cache_folder() / _name()
    try:
        if not target.exists():
            log.info("compiling the native kernels (a few seconds, once)")
            compile_kernels(target)
            _forget_old(target.parent)
        return _declared(ctypes.CDLL(str(target)))
    except OSError as error:
        raise CompileError(str(error)) from error


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """With argument types, so that a wrong call fails in Python."""
    pointer, long, flag, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
    signatures = {
        "wr_norm": [pointer] * 3 + [long] * 2 + [real, flag],
        "wr_rotate_and_store": [pointer] * 7 + [long] * 4 + [flag],
        "wr_pack": [pointer] * 2 + [long] * 2 + [flag],
        "wr_silu_mul": [pointer] * 2 + [long] * 2 + [flag],
        "wr_product": [pointer] * 4 + [long] * 3 + [flag] * 2,
        "wr_attend": [pointer] * 7 + [long] * 7 + [flag],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library


if __name__ == "__main__":
    try:
        load_library()
    except CompileError as error:
        print(f"no native kernels, plain torch will be used: {error}")
