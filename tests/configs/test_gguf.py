"""The GGUF reader: what it reads, and that it never trusts a length."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.errors import ModelError
from configs.model.gguf import GGUFFile
from tests.fakes.gguf_writer import write_gguf
from tests.fakes.tiny_model import write_tiny_gguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with one of everything, short enough to damage at every byte."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    metadata = {"a": 1, "b": 2.5, "c": "text", "d": ["x", "yy"], "e": [1, -2], "f": True}
    tensors = {"one": np.ones((2, 4), np.float32), "two": np.full(3, 0.5, np.float16)}
    return write_gguf(path, metadata, tensors).read_bytes()


def read_all(path: Path) -> dict[str, np.ndarray]:
    file = GGUFFile(path)
    return {name: file.tensor(name) for name in file.tensors}


def test_reads_what_was_written(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(small)
    file = GGUFFile(path)
    assert file.metadata == {
        "a": 1, "b": 2.5, "c": "text", "d": ["x", "yy"], "e": [1, -2], "f": True,
    }  # fmt: skip
    assert file.tensor("one").shape == (2, 4)
    assert file.tensor("two").tolist() == [0.5] * 3
    with pytest.raises(ModelError, match="no tensor 'three'"):
        file.tensor("three")


def test_tiny_model_is_deterministic(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "a.gguf").read_bytes()
    assert write_tiny_gguf(tmp_path / "b.gguf").read_bytes() == first
    assert write_tiny_gguf(tmp_path / "c.gguf", seed=1).read_bytes() != first


def test_every_truncation_is_refused(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "a.gguf"
    used = len(small) - 32 + 6  # behind the last tensor's 6 bytes there is only padding
    for size in range(used):
        path.write_bytes(small[:size])
        with pytest.raises(ModelError):
            read_all(path)
    path.write_bytes(small[:used])
    read_all(path)


@settings(max_examples=200)
@given(data=st.data())
def test_damage_gives_an_error_or_a_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, small: bytes
) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        width = data.draw(st.sampled_from([1, 8]))
        damaged[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        read_all(path)
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"GGML" + raw[4:], "not a GGUF file"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"),
        (lambda raw: raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:], "tensors"),
        (lambda raw: raw[:16] + struct.pack("<Q", 1 << 60) + raw[24:], "metadata keys"),
        (lambda raw: raw[:24] + struct.pack("<Q", 1 << 60) + raw[32:], "bytes in a string"),
        (lambda raw: b"", "empty"),
    ],
)
def test_messages_name_the_fault(tmp_path: Path, small: bytes, damage, message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(damage(small))
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match=str(path)):
            GGUFFile(path)
