"""Blocks on their way out: through to the host's tier at once, behind to the remote one later.

A block is gathered from the device without holding it: it is written only if the pool's generation
says that it was the same block before and after the copy. The remote tier gets what is used twice,
and what somebody waits for: such a write ends exactly once, told what is there then. Queues are
bounded and drop what waited longest; the engine's thread never waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

from kvstore.identity import BlockIdentity, Lineage, Namespace
from kvstore.level import Level
from kvstore.outbox import Outbox
from replica.sched.plan import ChildId
from replica.sched.tiers import StoredBlock
from replica.tiers.mover import BlockMover
from replica.tiers.spotcheck import SpotCheck
from replica.tiers.staging import Staging

log = logging.getLogger(__name__)

BATCH_BLOCKS = 8
MAX_NEAR = 4_096
MAX_FAR = 2_048
MAX_REMEMBERED = 16_384
"""Blocks that were computed here and not sent yet: a second use finds them."""


class Doorkeeper(Protocol):
    """Admits keys on their second use."""

    def touch(self, key: bytes) -> bool:
        """One use of a block: whether it was used before."""


@dataclass(frozen=True, slots=True)
class OutSettings:
    """`boot` goes into every header; a batch that takes longer than `write_s` is given up."""

    boot: int
    write_s: float = 5.0


@dataclass(frozen=True, slots=True)
class WriteOut:
    """Leading blocks of a child's prompt that somebody waits for."""

    child: ChildId
    level: Level
    blocks: tuple[StoredBlock, ...]
    deadline: float


Near = StoredBlock | tuple[bytes, ...] | WriteOut
"""What goes through the nearer queue; keys are those of blocks that were used once more."""


class Outbound:
    """`generation` and `written` must be set before the first block comes; the latter is told the
    end of each write that is waited for, on any thread. `near` and `far` may be missing."""

    def __init__(
        self,
        near: Level | None,
        far: Level | None,
        doorkeeper: Doorkeeper,
        mover: BlockMover,
        staging: Staging,
        spot: SpotCheck,
        cluster_key: bytes,
        namespace: Namespace,
        settings: OutSettings,
    ) -> None:
        self.generation: Callable[[int], int] = lambda block: -1
        self.written: Callable[[ChildId, int], None] = lambda child, blocks: None
        self.skipped: Counter[str] = Counter()
        self._near_level = near
        self._far_level = far
        self._doorkeeper = doorkeeper
        self._mover = mover
        self._staging = staging
        self._spot = spot
        self._cluster_key = cluster_key
        self._namespace = namespace
        self._settings = settings
        self._near: Outbox[Near] = Outbox(MAX_NEAR, self._lost)
        self._far: Outbox[StoredBlock | WriteOut] = Outbox(MAX_FAR, self._lost)
        self._remembered: OrderedDict[bytes, StoredBlock] = OrderedDict()
        self._awaiting: set[ChildId] = set()
        self._threads = [
            Thread(target=self._run_near, name="kv-write-near", daemon=True),
            Thread(target=self._run_far, name="kv-write-far", daemon=True),
        ]

    @property
    def backlog_blocks(self) -> tuple[int, int]:
        """What waits for the host's tier, and for the remote one."""
        return len(self._near), len(self._far)

    @property
    def dropped_blocks(self) -> tuple[int, int]:
        """What found no room in the queues."""
        return self._near.dropped, self._far.dropped

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stored(self, block: StoredBlock) -> None:
        """A block was computed and committed."""
        self._near.put([block])

    def used(self, keys: tuple[bytes, ...]) -> None:
        """Blocks on the device served one more request."""
        if self._far_level is not None:
            self._near.put([keys])

    def write_out(self, child: ChildId, level: Level, blocks: tuple[StoredBlock, ...]) -> None:
        """Have all of them in one of the levels; what was said before is written before."""
        deadline = time.monotonic() + self._settings.write_s
        self._awaiting.add(child)
        self._near.put([WriteOut(child, level, blocks, deadline)])

    def drop(self, child: ChildId) -> None:
        """Nobody waits for its blocks any more: what waits ends at once, what is being written with
        its batch. Unknown children are ignored."""
        if child in self._awaiting:
            self._awaiting.discard(child)
            for box in (self._near, self._far):
                box.forget(lambda item: isinstance(item, WriteOut) and item.child == child)

    def drain(self, timeout_s: float) -> bool:
        """Whether everything was written, or given up, within the time."""
        until = time.monotonic() + timeout_s
        return self._near.drain(timeout_s) and self._far.drain(max(0.0, until - time.monotonic()))

    def forget(self) -> None:
        """Drop what waits; a batch under way still ends."""
        self._near.clear()
        self._far.clear()

    def close(self) -> None:
        """Forget what waits. A batch under way may still end, in its own memory."""
        self._near.close()
        self._far.close()

    def _run_near(self) -> None:
        while items := self._near.take(BATCH_BLOCKS):
            blocks = [item for item in items if isinstance(item, StoredBlock)]
            self._guard(self._near_level, blocks)
            waited_for = [item for item in items if isinstance(item, WriteOut)]
            for item in waited_for:
                if item.level is self._near_level or item.child not in self._awaiting:
                    self._serve(item)
                elif self._far_level is not None:
                    self._far.put([item])
            if self._far_level is not None:
                self._far.put(self._twice_used(items))

    def _run_far(self) -> None:
        while items := self._far.take(BATCH_BLOCKS):
            self._guard(self._far_level, [item for item in items if isinstance(item, StoredBlock)])
            for item in items:
                if isinstance(item, WriteOut):
                    self._serve(item)

    def _serve(self, item: WriteOut) -> None:
        """Write what is missing, and tell what is there."""
        there = 0
        try:
            if item.child in self._awaiting:
                there = self._brought(item)
        except Exception as error:
            log.error("writing a prompt out failed: %s", type(error).__name__)
            self.skipped["fault"] += 1
        self._end(item.child, there)

    def _brought(self, item: WriteOut) -> int:
        """How many of its leading blocks are there now."""
        level, keys = item.level, [block.key for block in item.blocks]
        there = level.holds(keys, 0, item.deadline)
        missing = item.blocks[there:]
        for start in range(0, len(missing), BATCH_BLOCKS):
            late = time.monotonic() >= item.deadline
            if late or not level.usable or item.child not in self._awaiting:
                break
            self._write(level, missing[start : start + BATCH_BLOCKS], item.deadline)
        return level.holds(keys, 0, item.deadline) if missing else there

    def _end(self, child: ChildId, there: int) -> None:
        self._awaiting.discard(child)
        self.written(child, there)

    def _lost(self, item: Near) -> None:
        """It found no room, or nobody writes or wants it any more."""
        if isinstance(item, WriteOut):
            self._end(item.child, 0)

    def _twice_used(self, items: Sequence[Near]) -> list[StoredBlock]:
        """What the remote tier shall have from now on."""
        found = []
        for item in items:
            if isinstance(item, WriteOut):
                continue
            if isinstance(item, StoredBlock) and item.awaited:
                self._doorkeeper.touch(item.key)
                found.append(item)
                continue
            if isinstance(item, StoredBlock):
                self._remember(item)
                keys: tuple[bytes, ...] = (item.key,)
            else:
                keys = item
            for key in keys:
                if self._doorkeeper.touch(key) and key in self._remembered:
                    found.append(self._remembered.pop(key))
        return found

    def _remember(self, block: StoredBlock) -> None:
        self._remembered[block.key] = block
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def _guard(self, level: Level | None, blocks: Sequence[StoredBlock]) -> None:
        if not blocks:
            return
        try:
            self._write(level, blocks, time.monotonic() + self._settings.write_s)
        except Exception as error:
            # A fault of ours costs these blocks, not the thread.
            log.error("writing blocks failed: %s", type(error).__name__)
            self.skipped["fault"] += len(blocks)

    def _write(self, level: Level | None, blocks: Sequence[StoredBlock], deadline: float) -> None:
        due = [block for block in blocks if self._spot.awaits(block.key)]
        if level is None or not level.usable:
            if level is not None:
                self.skipped["unusable"] += len(blocks)
            blocks = due
        elif not due:
            blocks = blocks[level.holds([block.key for block in blocks], 0, deadline) :]
        slots = self._staging.take(len(blocks), deadline) if blocks else []
        try:
            gathered = self._gather(blocks[: len(slots)], slots, deadline)
            if level is not None and level.usable and gathered:
                identities, payloads = zip(*gathered, strict=True)
                level.write(identities, payloads, self._settings.boot, deadline)
        finally:
            self._staging.give(slots)
        self.skipped["late"] += len(blocks) - len(slots)

    def _gather(
        self, blocks: Sequence[StoredBlock], slots: Sequence[int], deadline: float
    ) -> list[tuple[BlockIdentity, memoryview]]:
        found = []
        for block, slot in zip(blocks, slots, strict=True):
            payload, identity = self._staging.buffer(slot), self._identity(block)
            if self._from_device(block, payload):
                self._spot.compare(block.key, payload)
            elif not self._from_near(identity, payload, deadline):
                self.skipped["evicted"] += 1
                continue
            found.append((identity, payload))
        return found

    def _from_device(self, block: StoredBlock, into: memoryview) -> bool:
        if self.generation(block.block) != block.generation:
            return False
        self._mover.gather(block.block, into)
        return self.generation(block.block) == block.generation

    def _from_near(self, identity: BlockIdentity, into: memoryview, deadline: float) -> bool:
        level = self._near_level
        if level is None or not level.holds([identity.key], 0, deadline):
            return False
        return level.read([identity], [into], deadline) == 1

    def _identity(self, block: StoredBlock) -> BlockIdentity:
        namespace = self._namespace.adapted(block.adapter)
        lineage = Lineage.of(self._cluster_key, namespace, block.salt, block.public_cut_blocks)
        return lineage.identity(block.index, block.before, block.key, block.tokens)
