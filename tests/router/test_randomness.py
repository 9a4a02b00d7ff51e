"""Random bytes by the page."""

from __future__ import annotations

from router.randomness import PAGE_BYTES, RandomBytes


def test_none_is_given_out_twice_and_all_are_as_long_as_asked() -> None:
    draw = RandomBytes()
    drawn = [draw(12) for _ in range(3 * PAGE_BYTES // 12)]
    assert {len(each) for each in drawn} == {12}
    assert len(set(drawn)) == len(drawn)
    assert len(draw(PAGE_BYTES)) == PAGE_BYTES
