"""A tier whose blocks are reached through sessions: sockets, files, HTTP clients.

Each thread holds one session. A session that fails is closed and opened again; what had not ended
by then is tried once more on the new one, from the block where the old one broke. A store that
keeps failing is left alone by the breaker: who asks then is told so at once. Nothing here knows
what a session talks to.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, TypeVar

from kvstore.block import Whose, header_bytes
from kvstore.breaker import Breaker, BreakerState
from kvstore.errors import BadBlockError
from kvstore.handle import Ended, Job, WorkThread
from kvstore.tier import (
    CLOSED,
    LATE,
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
)

log = logging.getLogger(__name__)

MAX_JOBS = 1_024
CONNECT_S = 1.0
DELETE_S = 2.0
PURGE_S = 60.0
ATTEMPTS = 2
AWAY = failed("away")
"""The store can't be reached, or is being left alone."""
LOST = failed("lost")
"""The connection broke in the middle, twice."""
_HEALTH = {
    BreakerState.CLOSED: Health.OK,
    BreakerState.HALF_OPEN: Health.TRYING,
    BreakerState.OPEN: Health.OPEN,
}
T = TypeVar("T")
Settle = Callable[[int, Outcome], None]
"""Told how request i of those handed over has ended."""


class Session(Protocol):
    """One thread's way into a store.

    Every method may raise OSError, and keeps to `deadline` (monotonic) by raising TimeoutError;
    the session is closed then. Requests that were settled before stay settled.
    """

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """Settle every read."""

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """Settle every write."""

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many keys from the first one on are there; they live on together from now."""

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Forget blocks."""

    def purge(self, whose: Whose, deadline: float) -> int:
        """Forget their blocks; how many those were."""

    def interrupt(self) -> None:
        """From any thread: the call under way raises OSError soon, and the session is closed then.
        Must not block."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`readers`: threads, and so sessions, for reads; writes have one of their own, so that a
    stalled write never keeps a read waiting. `backlog_bytes` of each thread."""

    readers: int = 2
    backlog_bytes: int = 256 * 1024 * 1024


class ConnectorTier:
    """A Tier over sessions, which `connect(deadline)` opens (raising OSError)."""

    def __init__(
        self,
        caps: Caps,
        connect: Callable[[float], Session],
        limits: Limits | None = None,
        usage: Callable[[], tuple[int, int]] = lambda: (0, 0),
        breaker: Breaker | None = None,
    ) -> None:
        """`usage` gives blocks and bytes stored, where that is known without asking anybody."""
        limits = limits or Limits()
        self._caps = caps
        self._usage = usage
        self._breaker = breaker or Breaker()
        lanes = [f"kv-{caps.name}-read-{number}" for number in range(limits.readers)]
        self._readers = [_Lane(name, connect, limits.backlog_bytes) for name in lanes]
        self._writer = _Lane(f"kv-{caps.name}-write", connect, limits.backlog_bytes)
        self._counts: Counter[Status] = Counter()
        self._read_bytes = self._written_bytes = 0
        self._lock = Lock()
        self._closed = False

    @property
    def caps(self) -> Caps:
        """What it is."""
        return self._caps

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many keys from the first one on are there; 0 when nobody answers in time."""
        if not keys:
            return 0
        return self._ask(
            self._reader(), lambda session: session.exists_prefix(keys, deadline), deadline, 0
        )

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        """The payloads land in a thread of the tier."""
        reads = [Read(read.key, _flat(read.into)) for read in reads]
        sizes = [len(read.into) for read in reads]

        def work(job: Job) -> Sequence[Outcome]:
            board = _Board(len(reads), landed)
            self._run(
                reader,
                job,
                board,
                lambda session: session.read(
                    [reads[place] for place in board.open], deadline, board.settle
                ),
            )
            return self._counted(board.outcomes(job), sizes)

        if refusal := self._refusal(sizes):
            return Ended(refusal)
        reader = self._reader()
        return reader.thread.submit(Job(work, len(reads), deadline, sum(sizes)))

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        """The payloads leave in a thread of the tier."""
        writes = [
            Write(write.key, write.header, _flat(write.payload), write.ttl_s) for write in writes
        ]
        sizes = [len(write.header) + len(write.payload) for write in writes]

        def work(job: Job) -> Sequence[Outcome]:
            board = _Board(len(writes), None)
            self._run(
                self._writer,
                job,
                board,
                lambda session: session.write(
                    [writes[place] for place in board.open], deadline, board.settle
                ),
            )
            return self._counted(board.outcomes(job), sizes)

        if refusal := self._refusal(sizes):
            return Ended(refusal)
        return self._writer.thread.submit(Job(work, len(writes), deadline, sum(sizes)))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Best effort, for DELETE_S at most."""
        deadline = time.monotonic() + DELETE_S
        self._ask(self._writer, lambda session: session.delete(keys, deadline), deadline, None)

    def purge(self, whose: Whose) -> int:
        """For PURGE_S at most; what was found by then is gone."""
        deadline = time.monotonic() + PURGE_S
        return self._ask(self._writer, lambda session: session.purge(whose, deadline), deadline, 0)

    def stats(self) -> TierStats:
        """Counts since the start."""
        blocks, used_bytes = self._usage()
        with self._lock:
            counts = Counter(self._counts)
            read_bytes, written_bytes = self._read_bytes, self._written_bytes
        return TierStats(
            hits=counts[Status.HIT],
            misses=counts[Status.MISS],
            stored=counts[Status.STORED],
            present=counts[Status.PRESENT],
            failed=counts[Status.FAILED],
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            blocks=blocks,
            used_bytes=used_bytes,
            backlog_bytes=sum(lane.thread.backlog_bytes for lane in self._lanes),
        )

    def health(self) -> Health:
        """What the breaker says."""
        return _HEALTH[self._breaker.state]

    def drain(self, timeout_s: float) -> None:
        """Let what is under way end, for so long at most."""
        until = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.thread.drain(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End everything now; buffers are free when this returns. Idempotent."""
        self._closed = True
        for lane in self._lanes:
            lane.close()

    @property
    def _lanes(self) -> list[_Lane]:
        return [*self._readers, self._writer]

    def _reader(self) -> _Lane:
        return min(self._readers, key=lambda lane: lane.thread.backlog_bytes)

    def _refusal(self, sizes: Sequence[int]) -> Sequence[Outcome]:
        """What the whole batch ends with before it has begun; empty when it may begin."""
        if self._closed:
            refused = CLOSED
        elif any(size > self._caps.max_value_bytes for size in sizes):
            refused = WRONG_SIZE
        elif not sizes or self._breaker.allow():
            return ()
        else:
            refused = AWAY
        return self._counted([refused] * len(sizes), sizes)

    def _ask(self, lane: _Lane, ask: Callable[[Session], T], deadline: float, otherwise: T) -> T:
        """One question, answered by the deadline, or `otherwise`."""
        answers: list[T] = []

        def work(job: Job) -> Sequence[Outcome]:
            board = _Board(0, None)
            self._run(lane, job, board, lambda session: answers.append(ask(session)))
            return ()

        if self._closed or not self._breaker.allow():
            return otherwise
        job = lane.thread.submit(Job(work, 0, deadline, size_bytes=1))
        with contextlib.suppress(TimeoutError):
            job.result(max(0.0, deadline - time.monotonic()))
        job.cancel()
        return answers[0] if answers else otherwise

    def _run(self, lane: _Lane, job: Job, board: _Board, use: Callable[[Session], None]) -> None:
        """Use the lane's session, and a new one for the rest when it breaks."""
        for _ in range(ATTEMPTS):
            stale = lane.connected
            try:
                session = lane.session(job.deadline)
                with job.touch(session.interrupt) as allowed:
                    if not allowed:
                        return
                    use(session)
            except OSError as error:
                lane.drop()
                if job.stopping is not None and (board.landed or job.stopping is not LATE):
                    return  # we broke it ourselves, or it is just slow
                board.reason = LOST if board.landed else AWAY
                silent = isinstance(error, TimeoutError)
                if silent or not stale:  # an old connection may just have been closed meanwhile
                    self._breaker.failed()
                if silent:
                    return
            except Exception:
                lane.drop()  # half a batch may still be on its way
                raise
            else:
                self._breaker.succeeded()
                return

    def _counted(self, outcomes: list[Outcome], sizes: Sequence[int]) -> Sequence[Outcome]:
        with self._lock:
            for outcome, size in zip(outcomes, sizes, strict=True):
                self._counts[outcome.status] += 1
                self._read_bytes += size if outcome.status is Status.HIT else 0
                self._written_bytes += size if outcome.status is Status.STORED else 0
        return outcomes


class _Board:
    """How the requests of one batch have ended so far."""

    def __init__(self, requests: int, landed: Landed | None) -> None:
        self._outcomes: list[Outcome | None] = [None] * requests
        self._told = landed
        self._base: list[int] = []
        self.landed = 0
        self.reason = AWAY

    @property
    def open(self) -> list[int]:
        """The places that have no outcome yet; what is settled next counts within these."""
        self._base = [place for place, was in enumerate(self._outcomes) if was is None]
        return self._base

    def settle(self, index: int, outcome: Outcome) -> None:
        """Of the index-th of `open`."""
        place = self._base[index]
        self._outcomes[place] = outcome
        self.landed += 1
        if self._told is not None and outcome.status is Status.HIT:
            self._told(place)

    def outcomes(self, job: Job) -> list[Outcome]:
        """All of them, in order."""
        rest = job.stopping or self.reason
        return [rest if was is None else was for was in self._outcomes]


class _Lane:
    """A thread and its session, which only that thread uses."""

    def __init__(self, name: str, connect: Callable[[float], Session], backlog_bytes: int) -> None:
        self.thread = WorkThread(name, MAX_JOBS, backlog_bytes)
        self._connect = connect
        self._session: Session | None = None

    @property
    def connected(self) -> bool:
        """Whether a session is open, as far as we know."""
        return self._session is not None

    def session(self, deadline: float) -> Session:
        """The open one, or a new one. Raises OSError."""
        if self._session is None:
            self._session = self._connect(min(deadline, time.monotonic() + CONNECT_S))
        return self._session

    def drop(self) -> None:
        """The session is of no use any more."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """The thread has ended when this returns."""
        self.thread.close()
        self.drop()


def whole_header(head: bytes) -> bool:
    """Whether what lies before a payload is exactly one header, by its own length."""
    try:
        return header_bytes(head) == len(head)
    except BadBlockError:
        return False


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
