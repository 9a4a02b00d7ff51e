"""What a tier is believed to hold: bounded, and told as net changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from events.cache import CacheFact, CacheOp
from kvstore.known import Known

Step = tuple[str, int]
STEPS = st.lists(st.tuples(st.sampled_from(["confirm", "deny", "drain"]), st.integers(0, 9)))


@given(STEPS, st.integers(1, 5))
def test_replaying_what_was_told_gives_what_is_known(steps: list[Step], most: int) -> None:
    known, told = Known(most), set[bytes]()

    def drain() -> None:
        for op, key in known.drain():
            assert (key in told) is (op is CacheOp.REMOVED)
            (told.remove if op is CacheOp.REMOVED else told.add)(key)

    for step, number in steps:
        key = bytes([number])
        if step == "confirm":
            known.confirm([key])
        elif step == "deny":
            known.deny(key)
        else:
            drain()
        assert len(known) <= most
    drain()
    assert len(told) == len(known)


def test_the_one_confirmed_longest_ago_leaves_first() -> None:
    known = Known(2)
    known.confirm([b"a", b"b"])
    known.confirm([b"a", b"c"])
    assert {key for _, key in known.drain()} == {b"a", b"c"}


def test_what_was_not_confirmed_for_as_long_as_blocks_live_is_not_known() -> None:
    now = [0.0]
    known = Known(9, 60.0, lambda: now[0])
    known.confirm([b"a", b"b"])
    known.drain()
    now[0] = 40.0
    known.confirm([b"b"])
    assert known.drain() == []
    now[0] = 70.0
    assert known.drain() == [CacheFact(CacheOp.REMOVED, b"a")]
    now[0] = 101.0
    assert known.drain() == [CacheFact(CacheOp.REMOVED, b"b")]


def test_of_what_others_share_only_what_was_used_here_is_ours_to_delete() -> None:
    known = Known(2)
    known.changed([b"a", b"b"], [])
    known.confirm([b"b", b"c", b"d"])
    known.changed([], [b"d"])
    assert known.forget() == [b"c"]
    assert known.forget() == []
    assert {key for _, key in known.drain()} == {b"a", b"b"}
    known.confirm([b"b"])
    known.lost()
    assert known.forget() == []
