"""The native checksums are the package's, whatever the size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.native import NativeSource
from kvstore import sums
from kvstore.sums import PACKAGE, copy_sums, layer_sums


def same(data: np.ndarray, layers: int) -> None:
    """Both give the same sums, and have copied the same."""
    native, expected = sums.native(), PACKAGE.sums(data, layers)
    assert native.sums(data, layers) == expected
    for copied, shift in ((native.copied, 0), (native.copied, 16), (PACKAGE.copied, 0)):
        into = aligned(len(data) + 64)[shift : shift + len(data)]
        assert copied(into, data, layers) == expected
        assert (into == data).all()


def aligned(size: int) -> np.ndarray:
    """At a border of 64 bytes, where large copies take another way."""
    raw = np.zeros(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


def data_of(size: int) -> np.ndarray:
    return np.frombuffer(random.Random(size).randbytes(size), np.uint8)


@given(st.integers(1, 5_000), st.integers(1, 4), st.integers(0, 63))
@settings(deadline=None)
def test_native_and_package_agree(size: int, layers: int, shift: int) -> None:
    same(data_of(shift + size * layers)[shift:], layers)


@pytest.mark.parametrize("size", [240, 241, 256, 1_024, 1_025, 2_048, 32_768, 1 << 20])
def test_at_the_borders_of_the_algorithm(size: int) -> None:
    same(data_of(2 * size), 2)


def test_a_known_sum() -> None:
    assert layer_sums(bytes(range(256)) * 2, 2).hex() == 2 * GOLDEN
    with pytest.raises(ValueError):
        layer_sums(bytes(9), 2)
    with pytest.raises(ValueError):
        copy_sums(np.zeros(3, np.uint8), np.zeros(4, np.uint8), 2)


GOLDEN = "9408a4433b952d71"


@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx2 -mno-avx512f"])
def test_without_wide_registers_it_is_the_same(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path))
    plain = NativeSource("sums", sums.KERNELS.folder, ("sums.cpp",), flags=tuple(flag.split()))
    monkeypatch.setattr(sums, "KERNELS", plain)
    same(data_of(3 * 4_160), 3)
    same(data_of(3 * 65_600), 3)
