"""Brings blocks from the tiers below to the device, while the engine computes other things.

Fetching threads read blocks into staging memory and check them there. One landing thread, which
never waits for a tier, copies what was checked to the device and ends each load: when all is there,
at its deadline, or when the request has ended. Whatever comes later is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from events.load import PrefillFit
from kvstore.cascade import Cascade, RecomputeMs, Run
from kvstore.identity import BlockIdentity, Lineage, Namespace
from kvstore.level import Level
from kvstore.transfer import End, Ending, Transfer
from replica.sched.plan import ChildId
from replica.sched.tiers import Wanted
from replica.tiers.load import Load, Phase
from replica.tiers.mover import BlockMover
from replica.tiers.spotcheck import SpotCheck
from replica.tiers.staging import Staging

log = logging.getLogger(__name__)

FETCHERS = 2
BATCH_BYTES = 8 << 20
"""How much is read at once: what has come meanwhile is copied to the device."""

MIN_RECOMPUTE_MS = 2.0
"""What takes less is not worth a question."""

Landed = Callable[[ChildId, int], None]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`deadline_s` for a load from admission on, and for one block run's fetch while it queues;
    `lookup_s` for asking the tiers what they have."""

    deadline_s: float = 2.0
    lookup_s: float = 0.1


class Loader:
    """`landed` and `prefill` must be set before the first call; `close` ends every load."""

    def __init__(
        self,
        cascade: Cascade,
        staging: Staging,
        mover: BlockMover,
        spot: SpotCheck,
        cluster_key: bytes,
        namespace: Namespace,
        payload_bytes: int,
        settings: LoadSettings,
    ) -> None:
        self.landed: Landed = _nobody
        self.prefill: Callable[[], PrefillFit] = _unknown
        self.ends: Counter[str] = Counter()
        self.loaded_blocks = 0
        self.discarded_blocks = 0
        self._cascade = cascade
        self._staging = staging
        self._mover = mover
        self._spot = spot
        self._cluster_key = cluster_key
        self._namespace = namespace
        self._block_tokens = namespace.layout.block_tokens
        self._batch = max(1, BATCH_BYTES // payload_bytes)
        self._settings = settings
        self._loads: dict[ChildId, Load] = {}
        self._queue: deque[Load] = deque()
        self._heads: Counter[bytes] = Counter()
        self._changed = Condition()
        self._closed = False
        self._threads = [
            Thread(target=self._fetch_all, name=f"kv-fetch-{number}", daemon=True)
            for number in range(FETCHERS)
        ]
        self._lander = Thread(target=self._land_all, name="kv-land", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, self._lander):
            thread.start()

    def look(self, wanted: Wanted) -> None:
        """Read ahead, unless somebody else already does, for the same blocks."""
        if not self._pays(wanted):
            return
        with self._changed:
            if wanted.child not in self._loads and not self._heads[wanted.head]:
                self._add(wanted)

    def worth(self, wanted: Wanted) -> bool:
        """Whether a load is under way or done, or worth a try."""
        with self._changed:
            load = self._loads.get(wanted.child)
            if load is not None and _covers(load, wanted):
                return not load.empty
        return self._pays(wanted)

    def land(self, wanted: Wanted, blocks: tuple[int, ...]) -> None:
        """To these device blocks; `landed` is called once for it."""
        deadline = time.monotonic() + self._patience_s(wanted)
        with self._changed:
            load = self._loads.get(wanted.child)
            if load is None or not _covers(load, wanted):
                if load is not None:
                    self._discard(load)
                load = self._add(wanted)
            load.skip = wanted.first - load.wanted.first
            load.blocks = blocks
            load.checked = self._spot.due()
            if load.phase is Phase.PAUSED:
                load.phase = Phase.QUEUED
                self._queue.append(load)
            load.transfer = Transfer(deadline, on_end=lambda ending: self._tell(load, ending))
            if self._closed:
                self._discard(load)
            self._changed.notify_all()

    def drop(self, child: ChildId) -> None:
        """Its request has ended."""
        with self._changed:
            load = self._loads.get(child)
            if load is not None:
                self._discard(load)
                self._changed.notify_all()

    def close(self) -> None:
        """End every load; returns when no device block is written any more."""
        with self._changed:
            self._closed = True
            for load in list(self._loads.values()):
                self._discard(load)
            self._changed.notify_all()
        if self._lander.ident is not None:
            self._lander.join()

    def _pays(self, wanted: Wanted) -> bool:
        recompute_ms = self._recompute_ms(wanted)
        if recompute_ms(wanted.blocks) < MIN_RECOMPUTE_MS:
            return False
        return self._cascade.pays(wanted.blocks, recompute_ms)

    def _recompute_ms(self, wanted: Wanted) -> RecomputeMs:
        fit, size = self.prefill(), self._block_tokens
        nothing = fit.predict_ms(wanted.first * size, 0)

        def recompute_ms(blocks: int) -> float:
            return fit.predict_ms(wanted.first * size, blocks * size) - nothing

        return recompute_ms

    def _patience_s(self, wanted: Wanted) -> float:
        """Waiting longer than computing would take helps nobody."""
        computing_s = self._recompute_ms(wanted)(wanted.blocks) / 1e3
        return min(self._settings.deadline_s, self._settings.lookup_s + computing_s)

    def _add(self, wanted: Wanted) -> Load:
        load = Load(wanted, time.monotonic() + self._settings.deadline_s)
        self._loads[wanted.child] = load
        self._heads[wanted.head] += 1
        self._queue.append(load)
        self._changed.notify_all()
        return load

    def _discard(self, load: Load) -> None:
        """Nothing more of it is of use; the lock is held."""
        if load.over:
            return
        load.over = True
        if self._loads.get(load.wanted.child) is load:
            del self._loads[load.wanted.child]
        head = load.wanted.head
        self._heads[head] -= 1
        if not self._heads[head]:
            del self._heads[head]
        self.discarded_blocks += len(load.ready)
        self._staging.give(slot for slot, _ in load.ready)
        load.ready.clear()
        if load.transfer is not None:
            load.transfer.end(End.CANCELLED)

    def _tell(self, load: Load, ending: Ending) -> None:
        """The terminal event: nobody writes the load's device blocks any more."""
        with self._changed:
            self.ends[ending.how] += 1
            self.loaded_blocks += load.landed
        self.landed(load.wanted.child, load.landed)

    def _fetch_all(self) -> None:
        while (load := self._next_load()) is not None:
            try:
                after = self._fetch(load)
            except Exception as error:
                # A fault of ours costs a recompute, not the thread.
                log.error("fetching blocks failed: %s", type(error).__name__)
                after = Phase.FETCHED
            with self._changed:
                load.phase = after
                if after is Phase.PAUSED and load.transfer is not None:
                    load.phase = Phase.QUEUED
                    self._queue.append(load)
                self._changed.notify_all()

    def _next_load(self) -> Load | None:
        """Whose request waits for it goes first."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return None
                waited_for = next((load for load in self._queue if load.blocks), self._queue[0])
                self._queue.remove(waited_for)
                if not waited_for.over:
                    waited_for.phase = Phase.FETCHING
                    return waited_for

    def _fetch(self, load: Load) -> Phase:
        """Fetch what is left of it; the phase that it is in then."""
        wanted, done = load.wanted, load.came
        compute_ms = self._recompute_ms(wanted)
        runs = self._cascade.plan(
            wanted.chain,
            wanted.first + done,
            lambda blocks: compute_ms(done + blocks) - compute_ms(done),
            time.monotonic() + self._settings.lookup_s,
        )
        for run in runs:
            after = self._fetch_run(load, run.level, self._identities(wanted, run))
            if after is not Phase.FETCHING:
                return after
        return Phase.FETCHED

    def _fetch_run(self, load: Load, level: Level, blocks: Sequence[BlockIdentity]) -> Phase:
        """FETCHED when something was missing, wrong or late: what is behind it is of no use."""
        at = 0
        while at < len(blocks):
            slots, deadline = self._take_slots(load, len(blocks) - at)
            if not slots:
                return Phase.FETCHED if load.transfer is not None else Phase.PAUSED
            buffers = [self._staging.buffer(slot) for slot in slots]
            came = level.read(blocks[at : at + len(slots)], buffers, deadline)
            self._staging.give(slots[came:])
            if not self._deliver(load, slots[:came], level) or came < len(slots):
                return Phase.FETCHED
            at += came
        return Phase.FETCHING

    def _take_slots(self, load: Load, most: int) -> tuple[list[int], float]:
        """Slots for the next batch, and its deadline. A load whose request still queues leaves half
        of them to those that are waited for, and doesn't wait for any."""
        transfer, most, now = load.transfer, min(most, self._batch), time.monotonic()
        if transfer is not None:
            return self._staging.take(most, transfer.deadline), transfer.deadline
        spare = self._staging.slots // 2
        return self._staging.take(most, now, spare), now + self._settings.deadline_s

    def _deliver(self, load: Load, slots: Sequence[int], level: Level) -> bool:
        """False when nobody waits for it any more."""
        with self._changed:
            if load.over:
                self.discarded_blocks += len(slots)
                self._staging.give(slots)
                return False
            load.ready.extend((slot, level) for slot in slots)
            load.came += len(slots)
            self._changed.notify_all()
            return True

    def _identities(self, wanted: Wanted, run: Run) -> list[BlockIdentity]:
        namespace = self._namespace.adapted(wanted.adapter)
        lineage = Lineage.of(self._cluster_key, namespace, wanted.salt, wanted.public_cut_blocks)
        size, chain = 4 * self._block_tokens, wanted.chain
        found = []
        for index in range(run.first, run.first + run.count):
            start = (index - wanted.first) * size
            before = chain[index - 1] if index else b""
            tokens = wanted.tokens[start : start + size]
            found.append(lineage.identity(index, before, chain[index], tokens))
        return found

    def _land_all(self) -> None:
        while not self._closed:
            ready = self._next_ready()
            if ready is not None:
                self._land(*ready)

    def _next_ready(self) -> tuple[Load, Transfer, int, Level] | None:
        """The next block to land, after a wait for one if need be; loads that are over end here."""
        with self._changed:
            load = self._next_landing()
            if load is None:
                if not self._closed:
                    self._changed.wait(self._until_deadline_s())
                return None
            transfer = load.transfer
            assert transfer is not None
            if load.done or transfer.asked:
                transfer.end(End.DONE)
                self._discard(load)
                return None
            return load, transfer, *load.ready.popleft()

    def _next_landing(self) -> Load | None:
        for load in self._loads.values():
            if load.transfer is not None and (load.ready or load.done or load.transfer.asked):
                return load
        return None

    def _until_deadline_s(self) -> float | None:
        transfers = [load.transfer for load in self._loads.values()]
        return min((transfer.remaining_s() for transfer in transfers if transfer), default=None)

    def _land(self, load: Load, transfer: Transfer, slot: int, level: Level) -> None:
        """Copy one block to the device, unless the load has ended meanwhile."""
        with transfer.touch() as allowed:
            if not allowed:
                self.discarded_blocks += 1
            else:
                try:
                    self._place(load, self._staging.buffer(slot), level)
                except Exception as error:
                    log.error("copying a block to the device failed: %s", type(error).__name__)
                    transfer.end(End.FAILED, "device")
        self._staging.give([slot])

    def _place(self, load: Load, payload: memoryview, level: Level) -> None:
        place = load.passed - load.skip
        if place >= 0:
            last = place + 1 == len(load.blocks) or (load.phase is Phase.FETCHED and not load.ready)
            if last and load.checked:
                key = load.wanted.chain[load.wanted.first + load.passed]
                self._spot.withhold(key, payload, level)
                load.withheld = True
                return
            self._mover.scatter(payload, load.blocks[place])
        load.passed += 1


def _covers(load: Load, wanted: Wanted) -> bool:
    """Whether the load is of these blocks, or of more before them."""
    return wanted.first >= load.wanted.first and load.wanted.chain == wanted.chain


def _nobody(child: ChildId, blocks: int) -> None:
    """Before an engine is attached."""


def _unknown() -> PrefillFit:
    """Before an engine is attached: nothing pays."""
    return PrefillFit(a=0.0, b=0.0, c=0.0, confidence=0.0)
