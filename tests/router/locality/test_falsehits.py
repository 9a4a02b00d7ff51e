"""The measured rate of false hits, against a library's filter of the same size."""

from __future__ import annotations

import numpy as np
import pytest
from pybloom_live import BloomFilter

from events.digest import positions
from router.locality.falsehits import PROBES, WINDOW_PROBES, FalseHits
from router.locality.index import DigestIndex
from tests.router.kit import SHAPE

HELD = 6_000


def full(index: DigestIndex, replica: str, keys: int) -> None:
    halves = np.random.default_rng(keys).integers(0, 1 << 64, (keys, 2), np.uint64)
    bits = np.zeros(SHAPE.bits, np.uint8)
    bits[positions(halves, SHAPE).ravel()] = 1
    index.place(replica, "pool", SHAPE)
    index.reset(replica, np.packbits(bits, bitorder="little"))


def test_the_measured_rate_is_a_librarys() -> None:
    index, measured = DigestIndex(), FalseHits(np.random.default_rng(7))
    full(index, "full", HELD)
    full(index, "empty", 1)
    index.place("unknown", "pool", SHAPE)
    probes = 800
    for _ in range(probes):
        measured.probe(index)
    stated = index.fill("full") ** SHAPE.k
    assert measured.rate("full") == pytest.approx(stated, rel=0.2)
    assert measured.rate("empty") == 0.0
    assert measured.rate("unknown") is None

    library = BloomFilter(capacity=HELD, error_rate=stated)
    for number in range(HELD):
        library.add(number)
    asked = PROBES * probes
    theirs = sum(number in library for number in range(HELD, HELD + asked)) / asked
    assert measured.rate("full") < 2 * theirs + 10 / asked


def test_what_was_measured_fades_and_goes_with_its_replica() -> None:
    index, measured = DigestIndex(), FalseHits(np.random.default_rng(7))
    full(index, "a", 1 << 16)
    for _ in range(2 * WINDOW_PROBES // PROBES):
        measured.probe(index)
    before = measured.rate("a")
    full(index, "a", 1)
    for _ in range(2 * WINDOW_PROBES // PROBES):
        measured.probe(index)
    assert measured.rate("a") < before / 2
    index.remove("a")
    measured.probe(index)
    assert list(measured.rates()) == []
