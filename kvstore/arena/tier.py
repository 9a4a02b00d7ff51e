"""The arena as a tier: two threads copy, one reads and one writes, each with a session of its own.

A batch costs two calls to the arena's books however many blocks it has. The copies run without the
interpreter's lock. A slot is left before its session is given up, so that an ended session means
that nobody touches its slots any more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock

import numpy as np

from kvstore.arena.arena import Arena
from kvstore.arena.control import Control, LocalControl
from kvstore.arena.messages import MAX_KEYS, Finished, Opened, Place, Refusal, Want
from kvstore.arena.segment import Segment
from kvstore.block import Signed, Whose, decode, layers_of
from kvstore.errors import AbandonedError, BadBlockError, StoreError
from kvstore.handle import Job, WorkThread
from kvstore.known import Known
from kvstore.sums import copy_sums
from kvstore.tier import (
    LATE,
    MISS,
    PRESENT,
    STORED,
    WRONG_SIZE,
    Caps,
    Handle,
    Health,
    Landed,
    Outcome,
    Read,
    Status,
    TierStats,
    Write,
    failed,
    hit,
)

UNREACHABLE = failed("unreachable")
GROUP_BYTES = 64 << 20
"""How much is reserved, or leased, at once."""
MAX_JOBS = 256
MAX_BACKLOG_BYTES = 1 << 30
MAX_VALUE_BYTES = 64 << 20

Connect = Callable[[str, float], Control]
"""A new session (name, deadline). Raises StoreError."""
Follow = Callable[[Known], Callable[[], None]]
"""Keeps a Known true from now on, until what it returns is called."""


class ArenaTier:
    """Blocks of an arena, which `connect` finds again after it was lost."""

    def __init__(self, connect: Connect, shared: bool, follow: Follow) -> None:
        self.caps = Caps(
            name="arena",
            max_value_bytes=MAX_VALUE_BYTES,
            trusted=True,
            shared=shared,
            drafts=True,
        )
        self._follow = follow
        self._unfollow: Callable[[], None] = _nobody
        self._reading = _Line(connect, "read")
        self._writing = _Line(connect, "write")
        self._asking = _Line(connect, "ask")
        self._reader = WorkThread("kv-arena-read", MAX_JOBS, MAX_BACKLOG_BYTES)
        self._writer = WorkThread("kv-arena-write", MAX_JOBS, MAX_BACKLOG_BYTES)
        self._counts: Counter[Status] = Counter()
        self._read_bytes = 0
        self._written_bytes = 0

    @classmethod
    def local(cls, arena: Arena) -> ArenaTier:
        """Of an arena in this process."""

        def follow(known: Known) -> Callable[[], None]:
            arena.subscribe(known.changed)
            return partial(arena.unsubscribe, known.changed)

        return cls(lambda name, deadline: LocalControl(arena, name), shared=False, follow=follow)

    def follow(self, known: Known) -> None:
        """Keep `known` true until the end: once, and whoever else writes here or evicts."""
        self._unfollow = self._follow(known)

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many keys from the first one on are there; 0 when the arena can't be asked."""
        try:
            with self._asking.control(deadline) as control:
                for start in range(0, len(keys), MAX_KEYS):
                    page = keys[start : start + MAX_KEYS]
                    there = control.exists_prefix(page, deadline)
                    if there < len(page):
                        return start + there
                return len(keys)
        except StoreError:
            return 0

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        """Read blocks in order, up to the first one that is not there."""
        size = sum(read.into.nbytes for read in reads)
        work = partial(self._get, reads, landed)
        return self._reader.submit(Job(work, len(reads), deadline, size))

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        """Store what is not there yet."""
        size = sum(write.payload.nbytes for write in writes)
        return self._writer.submit(Job(partial(self._put, writes), len(writes), deadline, size))

    def delete(self, keys: Sequence[bytes], deadline_s: float = 1.0) -> None:
        """Forget blocks, such as those that were found wrong."""
        deadline = time.monotonic() + deadline_s
        try:
            with self._asking.control(deadline) as control:
                for start in range(0, len(keys), MAX_KEYS):
                    control.delete(keys[start : start + MAX_KEYS], deadline)
        except StoreError:
            return

    def purge(self, whose: Whose, deadline_s: float = 5.0) -> int:
        """Forget all their blocks: an arena has those of one cluster."""
        deadline = time.monotonic() + deadline_s
        owner = None if isinstance(whose, Signed) else whose
        try:
            with self._asking.control(deadline) as control:
                return control.purge(owner, deadline)
        except StoreError:
            return 0

    def stats(self) -> TierStats:
        """What went through this tier; the arena counts for all its users."""
        counts = self._counts
        return TierStats(
            hits=counts[Status.HIT],
            misses=counts[Status.MISS],
            stored=counts[Status.STORED],
            present=counts[Status.PRESENT],
            failed=counts[Status.FAILED],
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            backlog_bytes=self._writer.backlog_bytes,
        )

    def health(self) -> Health:
        """Open while it is not worth to look for a lost arena again."""
        lines = (self._reading, self._writing, self._asking)
        return Health.OPEN if any(line.broken for line in lines) else Health.OK

    def drain(self, timeout_s: float) -> None:
        """Let what is under way end."""
        end = time.monotonic() + timeout_s
        self._writer.drain(timeout_s)
        self._reader.drain(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Ends after the copies that run now. Idempotent."""
        unfollow, self._unfollow = self._unfollow, _nobody
        unfollow()
        self._reader.close()
        self._writer.close()
        for line in (self._reading, self._writing, self._asking):
            line.close()

    def _get(self, reads: Sequence[Read], landed: Landed | None, job: Job) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            with self._reading.control(job.deadline) as control:
                for group in _groups([read.into.nbytes for read in reads]):
                    first = len(outcomes)
                    outcomes += self._get_group(control, reads[group], landed, first, job)
                    if any(outcome.status is not Status.HIT for outcome in outcomes[first:]):
                        break
        except StoreError:
            outcomes += [job.stopping or UNREACHABLE] * (len(reads) - len(outcomes))
        outcomes += [job.stopping or MISS] * (len(reads) - len(outcomes))
        self._counts.update(outcome.status for outcome in outcomes)
        return outcomes

    def _get_group(
        self, control: Control, reads: Sequence[Read], landed: Landed | None, first: int, job: Job
    ) -> list[Outcome]:
        with job.touch(control.interrupt) as allowed:
            keys = [read.key for read in reads] if allowed else []
            opened = control.open(keys, job.deadline)
        outcomes: list[Outcome] = []
        try:
            for place, (read, block) in enumerate(zip(reads, opened, strict=False)):
                outcomes.append(job.stopping or self._copy_out(control.segment, read, block))
                if landed is not None and outcomes[-1].status is Status.HIT:
                    landed(first + place)
        finally:
            control.release([block.place for block in opened])
        return outcomes + [job.stopping or MISS] * (len(reads) - len(outcomes))

    def _copy_out(self, segment: Segment, read: Read, block: Opened) -> Outcome:
        size, place = block.payload_bytes, block.place
        if read.into.nbytes != size:
            return WRONG_SIZE
        if segment.generation(place.offset) != place.generation:
            return MISS
        into = np.frombuffer(read.into, np.uint8)
        sums = copy_sums(into, segment.slot(place.offset, size), layers_of(block.header))
        if segment.generation(place.offset) != place.generation:
            return MISS
        self._read_bytes += size
        return hit(block.header, sums)

    def _put(self, writes: Sequence[Write], job: Job) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            with self._writing.control(job.deadline) as control:
                for group in _groups([write.payload.nbytes for write in writes]):
                    outcomes += self._put_group(control, writes[group], job)
        except StoreError:
            outcomes += [job.stopping or UNREACHABLE] * (len(writes) - len(outcomes))
        self._counts.update(outcome.status for outcome in outcomes)
        return outcomes

    def _put_group(self, control: Control, writes: Sequence[Write], job: Job) -> list[Outcome]:
        wants = [_want(write) for write in writes]
        outcomes = [want if isinstance(want, Outcome) else None for want in wants]
        asked = [place for place, want in enumerate(wants) if isinstance(want, Want)]
        with job.touch(control.interrupt) as allowed:
            if not allowed:
                return [job.stopping or LATE] * len(writes)
            answers = control.reserve([w for w in wants if isinstance(w, Want)], job.deadline)
        given: list[tuple[int, Place]] = []
        for place, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Place):
                given.append((place, answer))
            else:
                outcomes[place] = _refused(answer)
        written = self._copy_in(control, writes, given, job)
        for place, right in self._commit(control, written, job):
            outcomes[place] = STORED if right else None
        return [outcome or job.stopping or failed("commit") for outcome in outcomes]

    def _commit(
        self, control: Control, written: Sequence[tuple[int, Finished]], job: Job
    ) -> Iterator[tuple[int, bool]]:
        """Which blocks are readable now."""
        done = [block for _, block in written]
        with job.touch(control.interrupt) as allowed:
            if not allowed:
                control.abort([block.place for block in done])
                return
            right = control.commit(done, job.deadline)
        yield from zip((at for at, _ in written), right, strict=True)

    def _copy_in(
        self,
        control: Control,
        writes: Sequence[Write],
        given: Sequence[tuple[int, Place]],
        job: Job,
    ) -> Sequence[tuple[int, Finished]]:
        """Fills the slots; those that it didn't come to go back."""
        written = []
        for count, (at, place) in enumerate(given):
            if job.stopping:
                control.abort([place for _, place in given[count:]])
                break
            header = _filled(control.segment, place, writes[at])
            written.append((at, Finished(place, header, writes[at].ttl_s)))
            self._written_bytes += writes[at].payload.nbytes
        return written


def _filled(segment: Segment, place: Place, write: Write) -> bytes:
    """Copies a block into its slot; its header."""
    payload = np.frombuffer(write.payload, np.uint8)
    slot = segment.slot(place.offset, len(payload))
    if write.draft is not None:
        return write.draft.finished(copy_sums(slot, payload, write.draft.layers))
    np.copyto(slot, payload)
    return write.header


class _Line:
    """The session of one thread; made when it is needed, made anew after a loss, with pauses."""

    FIRST_PAUSE_S = 0.05
    LAST_PAUSE_S = 2.0

    def __init__(self, connect: Connect, name: str) -> None:
        self._connect = connect
        self._name = name
        self._lock = Lock()
        self._control: Control | None = None
        self._pause_s = self.FIRST_PAUSE_S
        self._again_at = 0.0
        self._closed = False

    @property
    def broken(self) -> bool:
        """Whether it was lost, and it is too early to try again."""
        return time.monotonic() < self._again_at

    @contextmanager
    def control(self, deadline: float) -> Iterator[Control]:
        """The session, for one caller at a time. It is given up when StoreError passes through."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError("the arena's line is busy")
        try:
            yield self._connected(deadline)
            self._pause_s, self._again_at = self.FIRST_PAUSE_S, 0.0
        except StoreError as error:
            self._lose()
            if not isinstance(error, AbandonedError) and not self.broken:
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, self.LAST_PAUSE_S)
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Gives everything back."""
        with self._lock:
            self._closed = True
            self._lose()

    def _connected(self, deadline: float) -> Control:
        if self._closed or self.broken:
            raise StoreError("the arena is not there")
        if self._control is None:
            self._control = self._connect(self._name, deadline)
        return self._control

    def _lose(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _nobody() -> None:
    """Nobody follows."""


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of at most MAX_KEYS requests and GROUP_BYTES, at least one each."""
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > GROUP_BYTES or place - start == MAX_KEYS):
            yield slice(start, place)
            start, total = place, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _want(write: Write) -> Want | Outcome:
    """What to ask for; or why it can't be stored, as far as its header says."""
    if write.draft is not None:
        return Want(write.key, write.payload.nbytes, write.draft.scope)
    try:
        header = decode(write.header)
    except BadBlockError as error:
        return failed(error.reason)
    if header.block.key != write.key or header.payload_bytes != write.payload.nbytes:
        return WRONG_SIZE
    return Want(write.key, header.payload_bytes, header.block.scope)


def _refused(refusal: Refusal) -> Outcome:
    return PRESENT if refusal in (Refusal.PRESENT, Refusal.BUSY) else failed(refusal)
