"""A replica under load that misbehaves: every answer right, nothing kept, memory flat.

WARMROUTE_SOAK_S says for how many seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from replica.front import fence
from replica.sched.invariants import check_scheduler
from tests.replica.cache.test_journal import replay
from tests.replica.front.test_engine import settled
from tests.replica.soak.clients import Router
from tests.replica.soak.scripts import chatty, learn, scripts
from tests.replica.soak.world import World, alone, loaded

SECONDS = float(os.environ.get("WARMROUTE_SOAK_S", "25"))
ROUTERS = 4
SCRIPTS = 64
CHATTY = 6
WARM_SHARE = 0.3
"""Of the time, until memory has to be flat."""

MIB = 1 << 20
GROWTH_MIB = 12.0
"""What warm memory may grow by in all, however long it takes: allocators keep what they had."""

LIVE_GROWTH_MIB = 3.0
LIVE_GROWTH = 0.03
"""What the bytes in use may grow by, and the share of Python's blocks: those tell a leak from what
allocators keep."""

POOL_THREADS = 8
"""The event loop's own pool, which starts them as it needs them."""

LEAK_S = 120.0
"""From so long a run on, what is in use has settled."""

MIN_PER_S = 1.0
CLEAR_EVERY_S = 5.0


class _Mallinfo(ctypes.Structure):
    """Of glibc; see mallinfo2(3)."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class Live:
    """What is in use, whatever the allocators hold: bytes of malloc, blocks of Python's own."""

    malloc_mib: float
    python_blocks: int

    @classmethod
    def now(cls) -> Live:
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo
        found = libc.mallinfo2()
        return cls((found.uordblks + found.hblkhd) / MIB, sys.getallocatedblocks())


@dataclass
class Watch:
    """A sample each second. `published` follows the journal as a reader of the bus does."""

    world: World
    rss_mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    live: list[Live] = field(default_factory=list)
    published: set[bytes] = field(default_factory=set)

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(1.0)

    def sample(self) -> None:
        engine, tiers = self.world.engine, self.world.tiers
        assert engine.load().alive
        assert self.world.front.app.healthy
        self.published = replay(self.published, engine.drain_facts())
        if tiers is not None:
            tiers.drain_facts()
            self.loaded.append(tiers.loader.loaded_blocks)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rss_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / MIB)
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(threading.active_count())
        if len(self.rss_mib) % max(1, int(SECONDS / 20)) == 0:
            self.live.append(Live.now())

    @property
    def warm_mib(self) -> float:
        """Just after the warm-up."""
        first = int(len(self.rss_mib) * WARM_SHARE)
        return statistics.median(self.rss_mib[first : first + max(3, first // 3)])

    def live_growth(self) -> tuple[float, float]:
        """From the warm-up to the end, each the median of several: MiB, and the share of blocks."""
        first = int(len(self.live) * WARM_SHARE)
        warm, last = self.live[first : first + 4], self.live[-4:]
        mib = [statistics.median(live.malloc_mib for live in part) for part in (warm, last)]
        blocks = [statistics.median(live.python_blocks for live in part) for part in (warm, last)]
        return mib[1] - mib[0], blocks[1] / blocks[0] - 1.0

    @property
    def last_mib(self) -> float:
        """At the end."""
        return statistics.median(self.rss_mib[-max(3, len(self.rss_mib) // 10) :])


async def clear_now_and_then(world: World) -> None:
    """The device alone, then everything and half the pool, then everything and all of it again."""
    while True:
        for limit, below in ((None, False), (40, True), (None, True)):
            await asyncio.sleep(CLEAR_EVERY_S)
            await asyncio.to_thread(world.engine.clear_cache, limit, below)


def assert_nothing_left(world: World, watch: Watch) -> None:
    """Everybody has ended: no blocks, no entries, no loads, no leases, no jobs."""
    engine, scheduler, tiers = world.engine, world.engine.scheduler, world.tiers
    check_scheduler(scheduler)
    assert len(scheduler.table) == 0
    assert not scheduler.in_flight
    assert scheduler.cache.available == scheduler.limits.total_blocks
    assert engine.open_children() == engine.load().broken_invariants == 0
    watch.sample()
    assert watch.published == set(scheduler.cache.nodes())
    compiling = world.front.front.intake.compiling
    assert compiling is not None
    assert len(compiling) == 0
    assert tiers is not None
    assert tiers.outbound.drain(20.0)
    loader = tiers.loader
    assert not loader._loads
    assert not loader._queue
    assert loader._staging.free == loader._staging.slots
    assert tiers.spot.mismatches == 0


async def soak(world: World, routers: list[Router], watch: Watch) -> None:
    until_s = time.monotonic() + SECONDS
    beside = [asyncio.create_task(watch.run()), asyncio.create_task(clear_now_and_then(world))]
    try:
        await asyncio.gather(*(router.run(until_s) for router in routers))
        for task in beside:
            assert not task.done(), task.exception()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


@pytest.mark.soak
async def test_O1_O5_misbehaviour_leaves_right_answers_and_nothing_else(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers are kept for a while by design: for less here, so that memory is soon flat.
    monkeypatch.setattr(fence, "KEPT_S", 2.0)
    known, many = scripts(seed=5, count=SCRIPTS), chatty(seed=6, count=CHATTY)
    async with alone(tiny_model) as world:
        await learn([*known, *many], await world.front.dial())
    tally: Counter[str] = Counter()
    async with loaded(tiny_model) as world:
        watch = Watch(world)
        routers = [Router(f"r{n}", world, known, tally, seed=n) for n in range(ROUTERS)]
        routers.append(Router("slow", world, many, tally, seed=ROUTERS, slow=True))
        routers.append(Router("dawdler", world, known, tally, seed=ROUTERS + 1, dawdles=True))
        await soak(world, routers, watch)
        await settled(world.front, world.engine)
        await asyncio.to_thread(world.engine.clear_cache, None, False)
        assert_nothing_left(world, watch)
        report(world, watch, tally)
    assert tally["asked"] == tally["answered"] + tally["lost"]
    assert tally["asked"] > MIN_PER_S * SECONDS
    assert watch.last_mib - watch.warm_mib < GROWTH_MIB
    if SECONDS >= LEAK_S:
        grown_mib, grown = watch.live_growth()
        assert grown_mib < LIVE_GROWTH_MIB
        assert grown < LIVE_GROWTH
        assert watch.loaded[len(watch.loaded) // 2] < watch.loaded[-1]
    assert watch.loaded[-1]
    assert watch.files[-1] <= max(watch.files[: len(watch.files) // 2])
    assert watch.threads[-1] <= max(watch.threads[: len(watch.threads) // 2]) + POOL_THREADS


def report(world: World, watch: Watch, tally: Counter[str]) -> None:
    """What the run was like; and that it met what it is for."""
    load, counters, tiers = world.engine.load(), world.front.front.counters, world.tiers
    assert tiers is not None
    assert world.flaky is not None
    figures = {
        "seconds": SECONDS,
        **tally,
        "steps": load.steps,
        "failed steps": load.failed_plans,
        "preemptions": load.preemptions_total,
        "displaced": dict(load.displaced),
        "loaded blocks": tiers.loader.loaded_blocks,
        "loads": dict(tiers.loader.ends),
        "mailbox holds": counters.mailbox_holds,
        "held KV": dict(load.held),
        "slow aborts": counters.mailbox_aborts,
        "late outputs": counters.late_outputs,
        "MiB warm": round(watch.warm_mib, 1),
        "MiB last": round(watch.last_mib, 1),
        "MiB most": round(max(watch.rss_mib), 1),
        "MiB in use, grown": round(watch.live_growth()[0], 2),
        "Python blocks, grown": f"{watch.live_growth()[1]:.2%}",
    }
    for name, value in figures.items():
        print(f"{name:>24}  {value}")
    needed = ("steps", "failed steps", "preemptions", "loaded blocks", "mailbox holds")
    for name in (*needed, "slow aborts"):
        assert figures[name], name
    assert load.held["aborted"], "nobody was ended by what its holds cost"
    for name in ("ended: stop", "ended: length", "ended: abort", "lost", "slow reads"):
        assert tally[name], name
