"""The journal holds net changes: bounded for ever, and its replay is today's residency."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from events.cache import CacheFact, CacheOp
from replica.cache.journal import Journal


def replay(resident: set[bytes], facts: Iterable[CacheFact]) -> set[bytes]:
    """What a publisher does with the facts; complains about facts that make no sense."""
    resident = set(resident)
    for op, key in facts:
        if op is CacheOp.CLEARED:
            resident.clear()
        elif op is CacheOp.STORED:
            assert key not in resident
            resident.add(key)
        else:
            resident.remove(key)
    return resident


def test_what_came_and_went_leaves_no_entry() -> None:
    journal = Journal()
    journal.stored(b"a")
    journal.removed(b"a")
    journal.stored(b"b")
    assert journal.drain() == [CacheFact(CacheOp.STORED, b"b")]
    journal.removed(b"b")
    journal.stored(b"b")
    assert journal.drain() == []


def test_clearing_makes_older_entries_needless() -> None:
    journal = Journal()
    journal.stored(b"a")
    journal.cleared()
    journal.stored(b"a")
    assert journal.drain() == [CacheFact(CacheOp.CLEARED, b""), CacheFact(CacheOp.STORED, b"a")]


@given(st.lists(st.sampled_from(["a", "b", "c", "clear", "drain"]), max_size=60))
def test_e12_replay_equals_residency_and_the_journal_is_bounded(steps: list[str]) -> None:
    journal, resident, published = Journal(), set[bytes](), set[bytes]()
    for step in steps:
        key = step.encode()
        if step == "drain":
            published = replay(published, journal.drain())
            assert published == resident
        elif step == "clear":
            resident.clear()
            journal.cleared()
        elif key in resident:
            resident.remove(key)
            journal.removed(key)
        else:
            resident.add(key)
            journal.stored(key)
        assert len(journal) <= len(published | resident) + 1
    assert replay(published, journal.drain()) == resident
