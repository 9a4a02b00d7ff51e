"""The per-tenant cache of token ids against a naive twin of its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.rendering.textcache import TextCache, pack

BIG = 10**9


def test_what_was_put_is_found_by_its_tenant_only() -> None:
    cache = TextCache(BIG, BIG)
    cache.put("a", "text", b"1234")
    assert cache.get("a", "text") == b"1234"
    assert cache.get("b", "text") is None
    assert cache.get("a", "other") is None


def test_the_newest_ids_win() -> None:
    cache = TextCache(BIG, BIG)
    cache.put("a", "text", b"1234")
    cache.put("a", "text", b"5678")
    assert cache.get("a", "text") == b"5678"


def test_the_least_recently_used_goes_first() -> None:
    cache = TextCache(BIG, 800)
    for name in ("x", "y"):
        cache.put("a", name, bytes(100))
    cache.get("a", "x")
    cache.put("a", "z", bytes(100))
    assert [cache.get("a", name) is not None for name in "xyz"] == [True, False, True]


def test_S6_a_flood_of_one_tenant_costs_the_others_nothing() -> None:
    cache = TextCache(100_000, 25_000)
    cache.put("quiet", "text", b"1234")
    for number in range(5_000):
        cache.put("loud", str(number), bytes(400))
    assert cache.get("quiet", "text") == b"1234"


def test_what_is_too_large_is_left_out() -> None:
    cache = TextCache(BIG, 1_000)
    cache.put("a", "x" * 2_000, b"")
    assert cache.size_bytes == 0


@given(
    puts=st.lists(
        st.tuples(st.sampled_from("abcd"), st.text(max_size=3), st.integers(0, 300)), max_size=60
    )
)
def test_the_bounds_hold_and_the_count_is_right(puts: list[tuple[str, str, int]]) -> None:
    cache = TextCache(2_500, 1_200)
    for tenant, text, size in puts:
        cache.put(tenant, text, bytes(size))
        shelves = cache._shelves.values()
        assert cache.size_bytes == sum(shelf.size_bytes for shelf in shelves) <= 2_500
        assert all(shelf.size_bytes <= 1_200 for shelf in shelves)
        assert all(shelf.entries for shelf in shelves)


def test_pack_is_little_endian() -> None:
    assert pack([1, 258]) == b"\1\0\0\0\2\1\0\0"
    assert pack([]) == b""
