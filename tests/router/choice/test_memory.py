"""R9: a router that serves long prompts, each of them new, for as long as it likes."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import pytest

from kvstore.identity import KEY_BYTES
from tests.router.kit import World, load, prompt

REPLICAS = ("r0", "r1", "r2", "r3")
BLOCKS = 512
"""8k tokens."""

SEEN_IN_FULL = 1_200
"""Requests after which every table that keeps so many of something is full."""

LATER = 400


@pytest.mark.slow
def test_R9_unique_long_prompts_leave_nothing_behind() -> None:
    world, numbers = World(len(REPLICAS)), itertools.count(1)

    def serve(requests: int) -> None:
        for _ in range(requests):
            keys = prompt((next(numbers), BLOCKS))
            decision = world.decide(keys)
            world.serve(decision)
            world.hold(decision.replica, keys)
            world.clock.pass_s(0.1)
            for replica in REPLICAS:
                world.fleet.on_load(replica, 1, load())
        world.told.clear()
        gc.collect()

    tracemalloc.start()
    try:
        serve(SEEN_IN_FULL)
        before, _ = tracemalloc.get_traced_memory()
        serve(LATER)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One that was kept by mistake would be LATER chains of 8 KiB each.
    assert after - before < 0.02 * LATER * BLOCKS * KEY_BYTES
    assert len(world.brain.ledger) == 0
