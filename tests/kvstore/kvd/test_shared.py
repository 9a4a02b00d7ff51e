"""Real processes share one arena; some are killed (K2, K6)."""

from __future__ import annotations

import os
import random
import signal
import time
from threading import Timer

import pytest

from kvstore.block import BlockHeader
from kvstore.kvd.client import open_tier
from kvstore.tier import Health, Status
from kvstore.verify import Verifier
from tests.kvstore.batches import get, put, writes_of
from tests.kvstore.blocks import CLUSTER_KEY, LAYOUT, NOW_MS, run_of
from tests.kvstore.kvd.daemon import SOON_S, Daemon, Nursery
from tests.kvstore.kvd.victims import RUN_BLOCKS, RUNS
from tests.processes import go_on, stand_still

VERIFIER = Verifier(CLUSTER_KEY, LAYOUT, now_ms=lambda: NOW_MS)
KILLS = 20
GONE_S = 10.0
"""Leases and writes of the living last longer."""


def test_what_one_writes_the_other_reads(daemon: Daemon) -> None:
    one, other = open_tier(daemon.path, "one"), open_tier(daemon.path, "other")
    blocks = run_of(3, seed=50)
    writes = writes_of(blocks, ttl_s=60.0)
    assert put(one, writes) == [Status.STORED] * 3
    assert put(other, writes) == [Status.PRESENT] * 3
    outcomes, payloads, landed = get(other, [block.key for block in blocks])
    assert payloads == [bytes(write.payload) for write in writes]
    assert [outcome.header for outcome in outcomes] == [write.header for write in writes]
    assert landed == [0, 1, 2]
    assert one.exists_prefix([block.key for block in blocks], time.monotonic() + SOON_S) == 3
    other.delete([blocks[0].key])
    assert one.exists_prefix([blocks[0].key], time.monotonic() + SOON_S) == 0
    assert one.purge(blocks[0].namespace) == 2
    one.close()
    other.close()
    daemon.wait_idle(SOON_S)


def test_K2_killed_users_leave_nothing_held_and_nothing_half_written(
    daemon: Daemon, nursery: Nursery
) -> None:
    tier, head = open_tier(daemon.path, "survivor"), run_of(1, seed=0)
    put(tier, writes_of(head))
    used = daemon.report().stats.used_bytes
    for seed in range(KILLS):
        pid = nursery.born("holder", seed)
        stats = daemon.report().stats
        assert (stats.writing, stats.leased) == (3, 1)
        os.kill(pid, signal.SIGKILL)
        _wait_for(daemon, used)
        keys = [block.key for block in run_of(4, seed=1_000 + seed)]
        assert tier.exists_prefix(keys[1:], time.monotonic() + SOON_S) == 0
    assert daemon.report().stats.reaped >= 4 * KILLS
    assert get(tier, [head[0].key])[0][0].status is Status.HIT
    tier.close()


def _wait_for(daemon: Daemon, used_bytes: int) -> None:
    """All that the dead user held is back, in time."""
    began = time.monotonic()
    while True:
        stats = daemon.report().stats
        if (stats.writing, stats.leased, stats.used_bytes) == (0, 0, used_bytes):
            return
        assert time.monotonic() - began < GONE_S, stats


def killed_at_work(daemon: Daemon, nursery: Nursery, times: int) -> None:
    """Nobody ever reads a wrong block."""
    dice = random.Random(times)
    for seed in range(times):
        pids = [nursery.born("worker", 2 * seed), nursery.born("worker", 2 * seed + 1)]
        time.sleep(dice.random() * 0.02)  # killed at any point of their work
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    daemon.wait_idle(SOON_S)
    tier, right = open_tier(daemon.path, "reader"), 0
    for seed in range(RUNS):
        blocks = run_of(RUN_BLOCKS, seed=seed)
        for block, place in zip(blocks, range(RUN_BLOCKS), strict=True):
            (outcome,), (payload,), _ = get(tier, [block.key])
            if outcome.status is Status.MISS:
                continue
            assert isinstance(VERIFIER.verdict(outcome, block, payload), BlockHeader)
            assert payload == bytes(writes_of(blocks)[place].payload)
            right += 1
    assert right > 0
    tier.close()


def test_K6_users_that_are_killed_at_work_never_leave_a_wrong_block(
    daemon: Daemon, nursery: Nursery
) -> None:
    killed_at_work(daemon, nursery, 6)


@pytest.mark.slow
def test_K6_fifty_times_two_users_killed_at_work(daemon: Daemon, nursery: Nursery) -> None:
    killed_at_work(daemon, nursery, 50)


def test_a_daemon_that_hangs_costs_its_users_their_deadline_only(daemon: Daemon) -> None:
    tier, blocks = open_tier(daemon.path, "patient"), run_of(2, seed=60)
    other = open_tier(daemon.path, "impatient")
    put(tier, writes_of(blocks))
    put(other, writes_of(blocks))
    stand_still(daemon.pid)
    try:
        began = time.monotonic()
        assert tier.exists_prefix([blocks[0].key], began + 0.1) == 0
        handle = tier.put(writes_of(run_of(2, seed=61)), time.monotonic() + 0.1)
        outcomes = handle.result(SOON_S)
        assert [outcome.status for outcome in outcomes] == [Status.FAILED] * 2
        assert tier.health() is Health.OPEN
        assert time.monotonic() - began < 20.0
        waiting = other.put(writes_of(run_of(2, seed=62)), time.monotonic() + 600)
        Timer(0.1, waiting.cancel).start()
        assert {outcome.reason for outcome in waiting.result(SOON_S)} == {"cancelled"}
        assert other.health() is Health.OK
    finally:
        go_on(daemon.pid)
    deadline = time.monotonic() + SOON_S
    while tier.exists_prefix([blocks[0].key], deadline) == 0:
        assert time.monotonic() < deadline
    outcomes, _, _ = get(tier, [block.key for block in blocks])
    assert [outcome.status for outcome in outcomes] == [Status.HIT] * 2
    assert put(other, writes_of(blocks)) == [Status.PRESENT] * 2
    tier.close()
    other.close()
    daemon.wait_idle(SOON_S)
