"""The arena's memory: generations apart from slots, mapped by others, not to be shrunk."""

from __future__ import annotations

import os
import resource

import pytest

from kvstore.arena.segment import UNIT_BYTES, Segment
from kvstore.errors import StoreError

SIZE = 1 << 20


def test_two_mappings_show_the_same_bytes_and_generations() -> None:
    owner = Segment.shared(SIZE)
    assert owner.fd is not None
    user = Segment(SIZE, os.dup(owner.fd))
    owner.stamp(8_192, 7)
    user.slot(8_192, 4_096)[:] = 3
    assert user.generation(8_192) == 7
    assert (owner.slot(8_192, 4_096) == 3).all()
    assert user.generation(4_096) == owner.generation(0) == 0
    owner.close()
    owner.close()
    assert (user.slot(8_192, 4_096) == 3).all()
    user.close()


def test_nobody_can_make_it_smaller() -> None:
    owner = Segment.shared(SIZE)
    assert owner.fd is not None
    with pytest.raises(OSError):
        os.ftruncate(owner.fd, 4_096)
    with pytest.raises(StoreError):
        Segment(2 * SIZE, owner.fd)
    owner.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (8, -9)])
def test_slots_lie_inside(offset: int, size: int) -> None:
    with pytest.raises(ValueError):
        Segment.private(SIZE).slot(offset, size)


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(StoreError):
        Segment.shared(1 << 50)
    with pytest.raises(StoreError):
        Segment.private(100)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="the kernel maps pages one by one",
)
def test_a_slot_is_mapped_before_it_is_written() -> None:
    segment = Segment.shared(4 << 20)
    fd = segment.fd
    assert fd is not None
    other = Segment.attached(os.dup(fd), 4 << 20)
    slot = other.slot(1 << 20, 2 << 20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slot[:] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < len(slot) // UNIT_BYTES // 8
    other.close()
    segment.close()
