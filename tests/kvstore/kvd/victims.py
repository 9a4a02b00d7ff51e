"""Users of the daemon that go on until they are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.arena.messages import Want
from kvstore.kvd.client import Kvd, open_tier
from tests.kvstore.batches import get, put, writes_of
from tests.kvstore.blocks import LAYOUT, run_of

RUN_BLOCKS = 6
RUNS = 8


def say() -> None:
    os.write(1, f"{os.getpid()}\n".encode())


def holder(path: Path, seed: int) -> None:
    """Three slots half-written, one block leased."""
    deadline = time.monotonic() + 10
    control = Kvd(path, "holder").connect("x", deadline)
    blocks = run_of(4, seed=1_000 + seed)
    wants = [Want(block.key, LAYOUT.payload_bytes, block.scope) for block in blocks[1:]]
    for place in control.reserve(wants, deadline):
        control.segment.slot(place.offset, LAYOUT.payload_bytes // 2)[:] = 255
    assert len(control.open([run_of(1, seed=0)[0].key], deadline)) == 1
    say()
    signal.pause()


def worker(path: Path, seed: int) -> None:
    """Writes and reads runs that the others write and read too."""
    tier, dice, said = open_tier(path, f"worker-{seed}"), random.Random(seed), False
    while True:
        blocks = run_of(RUN_BLOCKS, seed=dice.randrange(RUNS))
        put(tier, writes_of(blocks))
        get(tier, [block.key for block in blocks])
        if dice.random() < 0.3:
            tier.delete([blocks[dice.randrange(RUN_BLOCKS)].key])
        if not said:
            said = True
            say()


VICTIMS: dict[str, Callable[[Path, int], None]] = {"holder": holder, "worker": worker}
