"""The tier in this process's memory, which the others are compared with."""

from __future__ import annotations

import time

from kvstore.tier import Read, Status
from tests.fakes.memory_tier import MemoryTier
from tests.kvstore.batches import SOON_S, get, put, writes_of
from tests.kvstore.blocks import LAYOUT, run_of


def test_what_was_put_is_read_and_set_once() -> None:
    tier, writes = MemoryTier(1 << 20), writes_of(run_of(3))
    assert put(tier, writes[:2]) == [Status.STORED] * 2
    assert put(tier, writes[:2]) == [Status.PRESENT] * 2
    outcomes, payloads, landed = get(tier, [write.key for write in writes])
    assert [outcome.status for outcome in outcomes] == [Status.HIT, Status.HIT, Status.MISS]
    assert payloads[:2] == [bytes(write.payload) for write in writes[:2]]
    assert outcomes[0].header == writes[0].header
    assert landed == [0, 1]
    assert tier.exists_prefix([write.key for write in writes], time.monotonic() + SOON_S) == 2
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.stored, stats.present) == (2, 1, 2, 2)


def test_the_oldest_leave_where_it_is_full() -> None:
    writes = writes_of(run_of(3))
    size = len(writes[0].header) + LAYOUT.payload_bytes
    tier = MemoryTier(2 * size)
    put(tier, writes[:2])
    get(tier, [writes[0].key])
    put(tier, writes[2:])
    statuses = [outcome.status for outcome in get(tier, [write.key for write in writes])[0]]
    assert statuses == [Status.HIT, Status.MISS, Status.HIT]
    assert tier.stats().used_bytes == 2 * size


def test_a_ttl_ends_on_the_monotonic_clock() -> None:
    now = [0.0]
    tier, writes = MemoryTier(1 << 20, clock=lambda: now[0]), writes_of(run_of(2), ttl_s=10.0)
    deadline = 1e9
    tier.put(writes, deadline)
    now[0] = 9.9
    assert tier.exists_prefix([writes[0].key], deadline) == 1
    now[0] = 10.0
    assert tier.exists_prefix([writes[0].key], deadline) == 0
    assert tier.stats().blocks == 1
    assert tier.put(writes, deadline).result(0)[1].status is Status.STORED


def test_a_tenants_blocks_are_purged() -> None:
    tier, mine, theirs = MemoryTier(1 << 20), writes_of(run_of(2)), writes_of(run_of(3, seed=1))
    put(tier, mine)
    put(tier, theirs)
    block = run_of(1)[0]
    assert tier.purge(bytes(16)) == 0
    assert tier.purge(block.scope) == 5
    put(tier, mine)
    assert tier.purge(block.namespace) == 2


def test_wrong_sizes_late_and_closed_are_outcomes() -> None:
    tier, writes = MemoryTier(1 << 20), writes_of(run_of(1))
    put(tier, writes)
    short = tier.get([Read(writes[0].key, memoryview(bytearray(3)))], time.monotonic() + SOON_S)
    assert short.result(0)[0].reason == "size"
    assert tier.put(writes, time.monotonic() - 1).result(0)[0].reason == "deadline"
    tier.close()
    assert tier.put(writes, time.monotonic() + SOON_S).result(0)[0].reason == "closed"
