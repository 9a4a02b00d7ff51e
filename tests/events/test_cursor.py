"""Which delta comes next, what is held for after a snapshot, and what is thrown away."""

from __future__ import annotations

import numpy as np
import pytest

from events.cursor import MAX_HELD_DELTAS, Cursor, Verdict
from events.digest import DigestDelta
from events.errors import WireError
from events.snapshot import FrozenDigest
from tests.events.helpers import SHAPE

DELTA = DigestDelta(b"\x01\0\0\0", b"")


def frozen(generation: int, seq: int) -> FrozenDigest:
    return FrozenDigest.of(generation, seq, SHAPE, np.zeros(SHAPE.bits // 8, np.uint8))


def standing(generation: int, seq: int) -> Cursor:
    cursor = Cursor()
    cursor.restore(frozen(generation, seq))
    assert list(cursor.followers()) == []
    assert cursor.known
    return cursor


def test_only_the_next_delta_is_applied() -> None:
    cursor = standing(1, 5)
    assert cursor.accept(1, 6, DELTA) is Verdict.NEXT
    for at in ((1, 6), (1, 5), (0, 99)):
        assert cursor.accept(*at, DELTA) is Verdict.OLD
    assert cursor.known
    assert cursor.accept(1, 8, DELTA) is Verdict.GAP
    assert not cursor.known


def test_a_new_generation_is_a_gap() -> None:
    assert standing(1, 5).accept(2, 1, DELTA) is Verdict.GAP


def test_E1_the_cursor_goes_on_from_the_snapshots_own_number() -> None:
    cursor = Cursor()
    for seq in (58, 59, 60, 61, 60):
        cursor.accept(1, seq, DELTA)
    cursor.restore(frozen(1, 59))
    assert [seq for seq, *_ in cursor.followers()] == [60, 61]
    assert cursor.known
    assert cursor.accept(1, 62, DELTA) is Verdict.NEXT


def test_a_hole_behind_the_snapshot_leaves_it_unknown_once() -> None:
    cursor = Cursor()
    cursor.accept(1, 12, DELTA)
    cursor.restore(frozen(1, 10))
    assert list(cursor.followers()) == []
    assert not cursor.known
    cursor.restore(frozen(1, 12))
    assert list(cursor.followers()) == []
    assert cursor.known


def test_one_absurd_number_does_not_poison_the_cursor() -> None:
    cursor = Cursor()
    cursor.accept(1, 2**62, DELTA)
    cursor.restore(frozen(1, 10))
    list(cursor.followers())
    cursor.restore(frozen(1, 11))
    list(cursor.followers())
    assert cursor.known


def test_held_deltas_are_bounded() -> None:
    cursor = Cursor()
    for seq in range(5 * MAX_HELD_DELTAS):
        cursor.accept(1, seq + 1, DELTA)
        assert len(cursor._held) <= MAX_HELD_DELTAS
    huge = DigestDelta(bytes(250_000), b"")
    for seq in range(100):
        cursor.accept(2, seq + 1, huge)
        assert cursor._held_bytes <= 4 * 1024 * 1024


def test_a_held_delta_with_bad_positions_is_told() -> None:
    cursor = Cursor()
    cursor.accept(1, 1, DigestDelta(b"\xff\xff\xff\xff", b""))
    cursor.restore(frozen(1, 0))
    with pytest.raises(WireError):
        list(cursor.followers())
