"""Compiling kernels at set-up: what goes wrong, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.native import CompileError, NativeSource, compile_object, forget_old, load_object


@pytest.fixture
def source(tmp_path: Path) -> NativeSource:
    (tmp_path / "twice.cpp").write_text('extern "C" int wr_twice(int x) { return 2 * x; }')
    return NativeSource("twice", tmp_path, ("twice.cpp",))


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WARMROUTE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_object_is_compiled_once(source: NativeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_object(source).wr_twice(21) == 42
    monkeypatch.setenv("CXX", "false")
    assert load_object(source).wr_twice(4) == 8


LOAD = """
import logging, sys
from pathlib import Path
from configs.native import NativeSource, load_object
logging.basicConfig(level=logging.INFO, format="%(message)s")
print(load_object(NativeSource("twice", Path(sys.argv[1]), ("twice.cpp",))).wr_twice(21))
"""
COMPILER = """#!/bin/sh
echo run >> {log}
while [ ! -e {go} ]; do sleep 0.05; done
exec c++ "$@"
"""


def test_of_several_processes_one_compiles_and_the_others_wait(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs, go, compiler = tmp_path / "runs", tmp_path / "go", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=runs, go=go))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    left = source.target.parent / "tmp-left"
    left.mkdir(parents=True)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    loading = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.stderr.readline() for process in loading if process.stderr]
    go.touch()
    assert [process.communicate(timeout=60)[0] for process in loading] == ["42\n"] * 3
    assert sorted("waiting" in line for line in said) == [False, True, True]
    assert len(runs.read_text().split()) == 2  # the source, then the object
    assert not left.exists()
    assert sorted(path.suffix for path in left.parent.iterdir()) == [".lock", ".so"]


def test_another_source_is_another_object(source: NativeSource) -> None:
    before = source.target
    (source.folder / "twice.cpp").write_text("// changed")
    assert source.target != before


def test_a_source_that_does_not_compile_leaves_nothing_behind(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompileError):
        compile_object(source, tmp_path / "built" / "twice.so")
    assert list((tmp_path / "built").iterdir()) == []


def test_without_a_compiler_the_error_says_so(
    source: NativeSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"no C\+\+ compiler"):
        load_object(source)


def test_a_spoilt_object_in_the_cache_is_no_crash(source: NativeSource) -> None:
    source.target.parent.mkdir(parents=True)
    source.target.write_bytes(b"not an object")
    with pytest.raises(CompileError):
        load_object(source)


def test_only_the_newest_objects_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    for index in range(12):
        path = folder / f"kernels-{index}.so"
        path.touch()
        os.utime(path, (index, index))
    forget_old(folder, "kernels")
    kept = {int(path.stem.removeprefix("kernels-")) for path in folder.iterdir()}
    assert kept == set(range(4, 12))
