"""Tiers that only take room and time: what they keep, what they tell, how long a landing takes."""

from __future__ import annotations

import pytest

from events.cache import CacheOp
from events.load import PrefillFit
from replica.sched.plan import ChildId
from replica.sched.tiers import StoredBlock, Wanted
from tools.sim.clock import Agenda
from tools.sim.tiers import SimTiers, Store, TierSpec

MB_BLOCK = 1_000_000
KEYS = [bytes([number]) * 16 for number in range(8)]
SLOW = PrefillFit(a=0.0, b=1.0, c=0.0, confidence=1.0)


def tiers_over(agenda: Agenda, *specs: TierSpec, blocks: int = 100) -> SimTiers:
    stores = [(spec, Store(blocks)) for spec in specs]
    tiers = SimTiers(stores, MB_BLOCK, block_tokens=16, agenda=agenda)
    tiers.prefill = lambda: SLOW
    return tiers


def stored(key: bytes) -> StoredBlock:
    return StoredBlock("t", b"", 0, 0, b"", key, b"", 0, 0)


def wanted(first: int = 0) -> Wanted:
    return Wanted(ChildId(1), "t", b"", 0, first, tuple(KEYS), b"")


def run_dry(agenda: Agenda) -> None:
    while agenda.step():
        pass


def test_the_least_recently_used_leaves_and_is_untold() -> None:
    agenda = Agenda()
    tiers = tiers_over(agenda, TierSpec(0, 1.0, 0.0, shared=False), blocks=2)
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[2]):
        tiers.stored(stored(key))
    run_dry(agenda)
    (facts,) = tiers.drain_facts()
    assert [(op, key) for op, key in facts] == [
        (CacheOp.STORED, KEYS[0]),
        (CacheOp.STORED, KEYS[1]),
        (CacheOp.STORED, KEYS[2]),
        (CacheOp.REMOVED, KEYS[1]),
    ]
    assert tiers.drain_facts() == [[]]


def test_a_landing_takes_its_bytes_and_waits_for_the_one_before() -> None:
    agenda, landed = Agenda(), []
    tiers = tiers_over(agenda, TierSpec(0, 1.0, 3.0, shared=False))
    tiers.landed = lambda child, blocks: landed.append((agenda.now_s, blocks))
    for key in KEYS:
        tiers.stored(stored(key))
    run_dry(agenda)
    start_s = agenda.now_s
    tiers.land(wanted(first=4), ())
    tiers.land(wanted(), ())
    run_dry(agenda)
    assert [blocks for _, blocks in landed] == [4, 8]
    assert [at_s - start_s for at_s, _ in landed] == pytest.approx([0.007, 0.018])
    assert tiers.fetched_blocks == 12
    assert tiers.written_blocks == 8


def test_a_shared_store_gets_what_is_used_twice() -> None:
    agenda = Agenda()
    tiers = tiers_over(agenda, TierSpec(0, 1.0, 0.0, shared=True))
    tiers.stored(stored(KEYS[0]))
    tiers.stored(stored(KEYS[1]))
    tiers.used((KEYS[0],))
    run_dry(agenda)
    assert tiers.drain_facts() == [[(CacheOp.STORED, KEYS[0])]]


def test_what_is_slower_than_computing_is_not_worth_it() -> None:
    agenda = Agenda()
    tiers = tiers_over(agenda, TierSpec(0, 0.01, 0.0, shared=False))
    for key in KEYS:
        tiers.stored(stored(key))
    run_dry(agenda)
    assert not tiers.worth(wanted())
    tiers.prefill = lambda: PrefillFit(a=0.0, b=100.0, c=0.0, confidence=1.0)
    assert tiers.worth(wanted())


def test_who_knows_all_sees_what_is_below_and_uses_nothing() -> None:
    agenda = Agenda()
    host, shared = TierSpec(0, 1.0, 3.0, shared=False), TierSpec(0, 1.0, 0.5, shared=True)
    tiers = tiers_over(agenda, host, shared, blocks=2)
    assert tiers.reach(KEYS) == []
    for key in KEYS[:2]:
        tiers.stored(stored(key))
    tiers.used((KEYS[0],))  # its second use: the shared one gets it
    run_dry(agenda)
    assert tiers.reach(KEYS) == [(2, 5.0), (1, 1.5)]
    assert tiers.reach(KEYS[1:]) == [(1, 4.0)]
    tiers.stored(stored(KEYS[2]))
    run_dry(agenda)
    assert tiers.reach(KEYS) == [(1, 1.5)], "the oldest left, though it was looked at"
