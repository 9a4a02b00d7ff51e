"""Extents cut into slots of one size, given back with the last slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena.slabs import Slabs

MIB = 1 << 20


def test_an_extent_returns_with_its_last_slot_and_serves_another_size() -> None:
    slabs = Slabs(2 * MIB)
    small = [slabs.allocate(MIB // 4) for _ in range(8)]
    assert None not in small
    assert slabs.allocate(MIB) is None
    for offset in small[:4]:
        slabs.free(offset or 0)
    assert slabs.allocate(MIB) is not None
    assert slabs.allocate(MIB // 2) is None
    assert slabs.used_bytes == 2 * MIB


def test_what_is_too_large_for_an_extent_is_not_had() -> None:
    assert Slabs(2 * MIB).allocate(2 * MIB) is None


def test_a_block_of_a_large_model_fits_into_the_default_arena() -> None:
    block = 80 * 2 * 64 * 8 * 128 * 2  # layers, K and V, tokens, heads, dim, bytes
    assert Slabs(512 * MIB).allocate(block) is not None


@given(st.lists(st.tuples(st.sampled_from([4096, 12288, 262144, 1 << 20]), st.integers(0, 50))))
def test_slots_never_overlap_and_everything_comes_back(steps: list[tuple[int, int]]) -> None:
    slabs, held = Slabs(4 * MIB), dict[int, int]()
    for size, victim in steps:
        offset = slabs.allocate(size)
        if offset is not None:
            assert all(
                offset + size <= other or other + length <= offset for other, length in held.items()
            )
            assert 0 <= offset <= offset + size <= slabs.total_bytes
            held[offset] = size
        if victim % 3 == 0 and held:
            chosen = sorted(held)[victim % len(held)]
            slabs.free(chosen)
            del held[chosen]
        assert slabs.used_bytes == sum(held.values())
    for offset in held:
        slabs.free(offset)
    assert slabs.used_bytes == 0
    assert [slabs.allocate(MIB) for _ in range(5)].count(None) == 1
