"""The native loops against their NumPy twin: the same answers on any planes, not just likely ones.

The twin against the truth is test_index's part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.native import CompileError
from events.digest import positions
from events.load import DigestShape
from router.locality.planes import NumpyKernels, PlaneKernels, native_planes


@pytest.fixture(scope="module")
def native() -> PlaneKernels:
    try:
        return native_planes()
    except CompileError as error:
        if "no C++ compiler" not in str(error):
            raise
        pytest.skip(f"no native kernels here: {error}")


@dataclass(frozen=True)
class Planes:
    """Columns that hold leading parts of one chain, under random noise."""

    shape: DigestShape
    rows: np.ndarray
    known: np.ndarray
    halves: np.ndarray


@st.composite
def planes(draw: st.DrawFn) -> Planes:
    shape = DigestShape(bits=1 << draw(st.integers(6, 12)), k=draw(st.integers(1, 9)))
    words = draw(st.integers(1, 9))
    blocks = draw(st.one_of(st.integers(0, 40), st.integers(41, 600)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    halves = rng.integers(0, 1 << 63, (blocks, 2)).astype(np.uint64)
    rows = np.zeros((shape.bits, 64 * words), bool)
    rows |= rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]))
    where = positions(halves, shape)
    for column in rng.integers(0, 64 * words, draw(st.integers(0, 30))):
        rows[where[: rng.integers(0, blocks + 1)].ravel(), column] = True
    known = rng.random(64 * words) < draw(st.sampled_from([0.5, 1.0]))
    return Planes(shape, _packed(rows), _packed(known), halves)


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=-1, bitorder="little").view("<u8")


@settings(max_examples=150, deadline=None)
@given(case=planes())
def test_depths_are_the_twins(native: PlaneKernels, case: Planes) -> None:
    mine, theirs = (
        kernels.search(case.rows, case.shape, case.known) for kernels in (native, NumpyKernels())
    )
    for halves in (case.halves, case.halves[::2], case.halves):
        keys = halves.tobytes()
        np.testing.assert_array_equal(mine(keys), theirs(keys))


@settings(max_examples=50, deadline=None)
@given(case=planes(), seed=st.integers(0, 1 << 30), to=st.booleans())
def test_changes_are_the_twins(native: PlaneKernels, case: Planes, seed: int, to: bool) -> None:
    rng = np.random.default_rng(seed)
    column = int(rng.integers(0, 64 * case.rows.shape[1]))
    spots = rng.integers(0, case.shape.bits, 100).astype(np.uint32)
    bits = rng.integers(0, 256, case.shape.bits // 8).astype(np.uint8)
    found = []
    for kernels in (native, NumpyKernels()):
        rows = case.rows.copy()
        kernels.change(rows, column, spots, to)
        found.append(rows.copy())
        kernels.reset(rows, column, bits)
        found.append(rows)
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])


def test_a_false_positive_where_the_bisection_looks_does_not_lengthen_a_match(
    native: PlaneKernels,
) -> None:
    """One block past the true end looks held: only its neighbours tell."""
    shape, rng = DigestShape(bits=1 << 16, k=8), np.random.default_rng(1)
    halves = rng.integers(0, 1 << 63, (4_096, 2)).astype(np.uint64)
    rows, where = np.zeros((shape.bits, 1), np.uint64), positions(halves, shape)
    for block in (*range(100), 2_056, 3_000):
        rows[where[block], 0] = 1
    known = np.ones(1, np.uint64)
    for kernels in (native, NumpyKernels()):
        assert kernels.search(rows, shape, known)(halves.tobytes())[0] == 100
