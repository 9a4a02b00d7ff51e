"""Tiers below the device as places that only take room and time: a host's memory, a shared store.

Which runs are worth bringing in says the cascade of the real tiers, over levels without bytes; who
may enter the shared store says its doorkeeper. A copy waits for those before it on the same link,
one link in and one out for each replica and tier.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from events.cache import CacheFact, CacheOp
from events.load import FetchFit, PrefillFit
from kvstore.cascade import Cascade, RecomputeMs, Run
from kvstore.doorkeeper import Doorkeeper
from kvstore.level import Level
from replica.sched.plan import ChildId
from replica.sched.tiers import StoredBlock, Wanted
from tools.sim.clock import Agenda

SHARED = "shared"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Room for `tokens`, of each replica or of all together; a copy takes `latency_ms` and its
    bytes at `gbytes_per_s`. A shared one gets what is used twice, and what somebody waits for."""

    tokens: int
    gbytes_per_s: float
    latency_ms: float
    shared: bool

    @property
    def store(self) -> str:
        """As a hello names it."""
        return SHARED if self.shared else ""


class Store:
    """Keys only; the least recently used leave. Each has a tier that told of it, and untells it."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._tellers: OrderedDict[bytes, _Level] = OrderedDict()

    def put(self, key: bytes, teller: _Level) -> None:
        """It is there from now on."""
        if key in self._tellers:
            self._tellers.move_to_end(key)
            return
        self._tellers[key] = teller
        teller.facts.append(CacheFact(CacheOp.STORED, key))
        if len(self._tellers) > self._blocks:
            oldest, told = self._tellers.popitem(last=False)
            told.facts.append(CacheFact(CacheOp.REMOVED, oldest))

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there; nothing counts as used by that."""
        there = 0
        while there < len(keys) and keys[there] in self._tellers:
            there += 1
        return there

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there; they count as used, heads after their tails."""
        there = self.known(keys)
        for key in reversed(keys[:there]):
            self._tellers.move_to_end(key)
        return there


class _Link:
    """One direction: copies follow each other."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._free_s = 0.0
        self.blocks = 0

    def copy(self, blocks: int, takes_ms: float, then: Callable[[], None]) -> None:
        """`then`, once it is over."""
        self._free_s = max(self._agenda.now_s, self._free_s) + 1e-3 * takes_ms
        self.blocks += blocks
        self._agenda.at(self._free_s, then)

    @property
    def wait_ms(self) -> float:
        """Until it is free."""
        return 1e3 * max(0.0, self._free_s - self._agenda.now_s)


class _Level:
    """One tier as one replica sees it: what the cascade asks of `kvstore.level.Level`."""

    usable = True

    def __init__(self, spec: TierSpec, store: Store, block_bytes: int, agenda: Agenda) -> None:
        self.spec = spec
        self.store = store
        self.into, self.out = _Link(agenda), _Link(agenda)
        self.facts: list[CacheFact] = []
        self.fit = FetchFit(spec.latency_ms, 1e-6 * block_bytes / spec.gbytes_per_s)

    def fetch_ms(self, blocks: int) -> float:
        """Behind what is on its way."""
        return self.into.wait_ms + self.fit.latency + self.fit.per_block * blocks

    def holds(self, chain: Sequence[bytes], first: int, deadline: float) -> int:
        """See Level.holds."""
        return self.store.leading(chain[first:])


class SimTiers:
    """Implements replica.sched.tiers.Tiers for one life of one replica."""

    def __init__(
        self,
        levels: Sequence[tuple[TierSpec, Store]],
        block_bytes: int,
        block_tokens: int,
        agenda: Agenda,
    ) -> None:
        """The owner sets `landed` and `written`, which take terminal events, `prefill`, how fast it
        computes, and `changed`, which hears that there is something to publish."""
        self.landed: Callable[[ChildId, int], None] = lambda *_: None
        self.written: Callable[[ChildId, int], None] = lambda *_: None
        self.prefill: Callable[[], PrefillFit]
        self.changed: Callable[[], None] = lambda: None
        self._block_tokens = block_tokens
        self._agenda = agenda
        self._levels = [_Level(spec, store, block_bytes, agenda) for spec, store in levels]
        # The cascade reads three things of a level, and these are all that ours has.
        self._cascade = Cascade(cast(list[Level], self._levels), clock=agenda)
        self._doorkeeper = Doorkeeper(clock=agenda)

    @property
    def fetched_blocks(self) -> int:
        """From all tiers."""
        return sum(level.into.blocks for level in self._levels)

    @property
    def written_blocks(self) -> int:
        """To all tiers."""
        return sum(level.out.blocks for level in self._levels)

    def drain_facts(self) -> list[list[CacheFact]]:
        """What of each tier is new."""
        drained = [level.facts for level in self._levels]
        for level in self._levels:
            level.facts = []
        return drained

    def fetch_fits(self) -> tuple[FetchFit, ...]:
        """How fast each tier gives blocks."""
        return tuple(level.fit for level in self._levels)

    def reach(self, keys: Sequence[bytes]) -> list[tuple[int, float]]:
        """Of each tier: how many of the first keys it has, and the ms until they were here."""
        held = [(level, level.store.known(keys)) for level in self._levels]
        return [(blocks, level.fetch_ms(blocks)) for level, blocks in held if blocks]

    def look(self, wanted: Wanted) -> None:
        """Nothing is read ahead."""

    def worth(self, wanted: Wanted) -> bool:
        """Whether any run pays."""
        return bool(self._runs(wanted))

    def land(self, wanted: Wanted, blocks: tuple[int, ...]) -> None:
        """One run after the other; the end of the last one lands them all."""
        runs = self._runs(wanted)
        count = sum(run.count for run in runs)
        waits = [(run, cast(_Level, run.level)) for run in runs]

        def follow() -> None:
            if not waits:
                self.landed(wanted.child, count)
                return
            run, level = waits.pop(0)
            takes_ms = level.fit.latency + level.fit.per_block * run.count
            level.into.copy(run.count, takes_ms, follow)

        self._agenda.after(0.0, follow)

    def drop(self, child: ChildId) -> None:
        """A copy under way still ends."""

    def stored(self, block: StoredBlock) -> None:
        """Through to the replica's own tier; to a shared one on its second use."""
        for level in self._levels:
            if not level.spec.shared or self._doorkeeper.touch(block.key) or block.awaited:
                self._write(level, block.key)

    def write_out(self, child: ChildId, store: str, blocks: tuple[StoredBlock, ...]) -> None:
        """Behind what is on its way there: what is missing then, and the end behind that."""
        level = next((level for level in self._levels if level.spec.store == store), None)
        keys = [block.key for block in blocks]
        if level is None:
            self._agenda.after(0.0, lambda: self.written(child, 0))
            return

        def look() -> None:
            for key in keys[level.store.leading(keys) :]:
                self._write(level, key)
            level.out.copy(0, 0.0, lambda: self.written(child, level.store.leading(keys)))

        level.out.copy(0, level.fit.latency, look)

    def used(self, keys: tuple[bytes, ...]) -> None:
        """These are on the device, so they can be written."""
        for level in self._levels:
            if level.spec.shared:
                for key in keys:
                    if self._doorkeeper.touch(key) and not level.store.leading([key]):
                        self._write(level, key)

    def _runs(self, wanted: Wanted) -> tuple[Run, ...]:
        return self._cascade.plan(wanted.chain, wanted.first, self._recompute(wanted), math.inf)

    def _recompute(self, wanted: Wanted) -> RecomputeMs:
        fit, size = self.prefill(), self._block_tokens
        nothing = fit.predict_ms(wanted.first * size, 0)
        return lambda blocks: fit.predict_ms(wanted.first * size, blocks * size) - nothing

    def _write(self, level: _Level, key: bytes) -> None:
        def done() -> None:
            level.store.put(key, level)
            self.changed()

        level.out.copy(1, level.fit.per_block, done)
