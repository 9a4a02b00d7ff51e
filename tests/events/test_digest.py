"""Positions, counting, deltas: against a naive multiset, theory and a Bloom filter of a library."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pybloom_live import BloomFilter

from events.digest import (
    MAX_DELTA_POSITIONS,
    STUCK,
    CountingDigest,
    DigestDelta,
    check_shape,
    expected_rate,
    fitting_shape,
    halves_of,
    positions,
    split_delta,
)
from events.errors import InvariantError, WireError
from events.load import DigestShape
from tests.events.helpers import SHAPE, key

# By hand: the halves' low 16 bits are 0x0100 and 0x0908 | 1, so 256, 256 + 2313, and so on.
GOLDEN = [
    [256, 2569, 4882, 7195, 9508, 11821, 14134, 16447],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [65535, 65534, 65533, 65532, 65531, 65530, 65529, 65528],
    [58533, 60364, 62195, 64026, 321, 2152, 3983, 5814],
]
EMPTY = np.empty(0, np.uint32)


def bits_of(numbers: list[int], shape: DigestShape = SHAPE) -> np.ndarray:
    """The oracle: every position of every key, one by one."""
    bits = np.zeros(shape.bits, dtype=bool)
    for number in numbers:
        first, second = (int(half) for half in halves_of([key(number)])[0])
        for index in range(shape.k):
            bits[(first + index * (second | 1)) % shape.bits] = True
    return bits


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, bitorder="little").astype(bool)


def test_golden_positions() -> None:
    keys = halves_of([bytes(range(16)), bytes(16), b"\xff" * 16, key(7)])
    found = positions(keys, DigestShape(bits=65_536, k=8))
    assert found.dtype == np.uint32
    assert found.tolist() == GOLDEN


def test_positions_of_one_key_are_distinct() -> None:
    shape = DigestShape(bits=64, k=32)
    for row in positions(halves_of([key(number) for number in range(500)]), shape):
        assert len(set(row.tolist())) == shape.k


def test_positions_of_no_keys() -> None:
    assert positions(halves_of([]), SHAPE).shape == (0, SHAPE.k)


@pytest.mark.parametrize(
    ("bits", "k"), [(0, 4), (100, 4), (32, 4), (1 << 27, 4), (1024, 0), (1024, 33), (-64, 4)]
)
def test_bad_shapes_are_refused(bits: int, k: int) -> None:
    with pytest.raises(WireError):
        check_shape(DigestShape(bits=bits, k=k))


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 40), max_size=8)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 40), max_size=8)),
        st.tuples(st.sampled_from(["clear", "take"]), st.just([])),
    ),
    max_size=40,
)


@given(OPS)
@settings(max_examples=150, deadline=None)
def test_counting_digest_equals_a_multiset(ops: list[tuple[str, list[int]]]) -> None:
    digest, resident = CountingDigest(SHAPE), Counter[int]()
    reader = np.zeros(SHAPE.bits, dtype=bool)
    for op, numbers in [*ops, ("take", [])]:
        keys = halves_of([key(number) for number in numbers])
        if op == "store":
            digest.store(keys)
            resident.update(numbers)
        elif op == "remove" and Counter(numbers) <= resident:
            digest.remove(keys)
            resident -= Counter(numbers)
        elif op == "clear":
            digest.clear()
            resident.clear()
        elif op == "take":
            became_set, became_clear = digest.take_delta()
            assert not reader[became_set].any()
            assert reader[became_clear].all()
            reader[became_set], reader[became_clear] = True, False
            assert (reader == bits_of(list(resident))).all()
            assert (unpack(digest.snapshot()) == reader).all()
        set_share = bits_of(list(resident)).mean()
        assert digest.false_positive_rate == pytest.approx(set_share**SHAPE.k)


def test_removing_an_absent_key_is_loud_and_changes_nothing() -> None:
    digest = CountingDigest(SHAPE)
    digest.store(halves_of([key(1)]))
    with pytest.raises(InvariantError):
        digest.remove(halves_of([key(1), key(2)]))
    digest.take_delta()
    assert (unpack(digest.snapshot()) == bits_of([1])).all()


def test_a_saturated_counter_never_hides_a_key() -> None:
    digest = CountingDigest(SHAPE)
    one = halves_of([key(1)])
    for _ in range(STUCK + 50):
        digest.store(one)
    assert digest.stuck == SHAPE.k
    for _ in range(STUCK + 49):
        digest.remove(one)
    digest.take_delta()
    assert (unpack(digest.snapshot()) == bits_of([1])).all()
    assert CountingDigest.grown(SHAPE, one).stuck == 0


def test_a_snapshot_is_of_what_was_told_not_of_what_is() -> None:
    digest = CountingDigest(SHAPE)
    digest.store(halves_of([key(1)]))
    digest.take_delta()
    digest.store(halves_of([key(2)]))
    assert (unpack(digest.snapshot()) == bits_of([1])).all()


def test_untaken_changes_stay_bounded() -> None:
    digest = CountingDigest(SHAPE)
    for number in range(1_200):
        one = halves_of([key(number)])
        digest.store(one)
        digest.remove(one)
    assert sum(part.size for part in digest._touched) <= 2 * SHAPE.bits
    assert [part.size for part in digest.take_delta()] == [0, 0]


def test_growing_keeps_the_keys_and_lowers_the_rate() -> None:
    numbers = list(range(300))
    keys = halves_of([key(number) for number in numbers])
    shape = fitting_shape(SHAPE, len(numbers), 0.001)
    grown = CountingDigest.grown(shape, keys)
    assert shape.bits > SHAPE.bits
    assert grown.false_positive_rate <= 0.001
    assert (unpack(grown.snapshot()) == bits_of(numbers, shape)).all()
    assert [part.size for part in grown.take_delta()] == [0, 0]


def test_false_positives_are_as_stated_and_as_good_as_a_librarys() -> None:
    shape, resident, asked = DigestShape(bits=16_384, k=8), 1_400, 40_000
    digest = CountingDigest.grown(shape, halves_of([key(number) for number in range(resident)]))
    bits = unpack(digest.snapshot())
    probes = positions(halves_of([key(1_000_000 + number) for number in range(asked)]), shape)
    measured = float(bits[probes].all(axis=1).mean())
    assert digest.false_positive_rate == pytest.approx(
        expected_rate(shape.bits, 8, resident), rel=0.25
    )
    assert measured < 2 * digest.false_positive_rate + 5 / asked

    library = BloomFilter(capacity=resident, error_rate=digest.false_positive_rate)
    for number in range(resident):
        library.add(key(number))
    theirs = sum(key(1_000_000 + number) in library for number in range(asked)) / asked
    assert measured < 2 * theirs + 10 / asked
    assert library.num_bits > shape.bits * 0.6


def test_deltas_cross_the_wire() -> None:
    became_set, became_clear = np.array([1, 5, 9], np.uint32), np.array([2], np.uint32)
    (delta,) = split_delta(became_set, became_clear)
    assert [part.tolist() for part in delta.positions(1024)] == [[1, 5, 9], [2]]
    assert delta.set == b"\x01\0\0\0\x05\0\0\0\x09\0\0\0"
    assert split_delta(EMPTY, EMPTY) == []


def test_a_huge_delta_is_cut_into_bounded_messages() -> None:
    everything = np.arange(3 * MAX_DELTA_POSITIONS, dtype=np.uint32)
    parts = split_delta(everything, EMPTY)
    assert all(len(part.set) + len(part.clear) <= 4 * MAX_DELTA_POSITIONS for part in parts)
    joined = np.concatenate([part.positions(1 << 20)[0] for part in parts])
    assert (joined == everything).all()


@pytest.mark.parametrize(
    "delta",
    [
        DigestDelta(b"\0\0\0", b""),
        DigestDelta(b"", b"\0\x04\0\0"),
        DigestDelta(b"\xff\xff\xff\xff", b""),
        DigestDelta(bytes(4 * MAX_DELTA_POSITIONS + 4), b""),
    ],
)
def test_bad_positions_are_refused(delta: DigestDelta) -> None:
    with pytest.raises(WireError):
        delta.positions(1024)
