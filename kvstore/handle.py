"""Batches under way: handles whose cancel returns once no buffer is referenced, and the thread that
works on them in order. Every tier with a thread of its own uses these."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Event, Lock, Thread

from kvstore.tier import BUSY, CANCELLED, CLOSED, LATE, Outcome, failed

log = logging.getLogger(__name__)


class Ended:
    """A batch that was over when it was handed out."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    def result(self, timeout_s: float) -> Sequence[Outcome]:
        """At once."""
        return self._outcomes

    def cancel(self) -> None:
        """Too late."""


class Job:
    """One batch for a WorkThread: `work(job)` gives an outcome per request, and looks at `stopping`
    before each block. `size_bytes` counts against the thread's backlog."""

    def __init__(
        self,
        work: Callable[[Job], Sequence[Outcome]],
        requests: int,
        deadline: float,
        size_bytes: int = 0,
    ) -> None:
        self.deadline = deadline
        self.size_bytes = size_bytes
        self._work = work
        self._requests = requests
        self._cancelled = False
        self._started = False
        self._lock = Lock()
        self._ended = Event()
        self._outcomes: Sequence[Outcome] = ()

    @property
    def stopping(self) -> Outcome | None:
        """How the rest of the batch ends when it must not go on; None while it may."""
        if self._cancelled:
            return CANCELLED
        return LATE if time.monotonic() > self.deadline else None

    @property
    def ended(self) -> bool:
        """Whether its outcomes are known."""
        return self._ended.is_set()

    def result(self, timeout_s: float) -> Sequence[Outcome]:
        """One outcome per request, in order. Raises TimeoutError while it has not ended."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError("the batch has not ended")
        return self._outcomes

    def cancel(self) -> None:
        """Returns only when no buffer of the batch is referenced any more."""
        self._cancelled = True
        self.refuse(CANCELLED)
        self._ended.wait()

    def run(self) -> None:
        """Work on it now, in this thread; it has ended then, whatever happened."""
        if not self._start():
            return
        try:
            stopping = self.stopping
            self._finish(self._all(stopping) if stopping else self._work(self))
        except Exception:
            # A fault of ours must not cost the engine more than a miss, nor the thread its life.
            log.exception("a batch of KV blocks failed")
            self._finish(self._all(failed("fault")))

    def refuse(self, outcome: Outcome) -> None:
        """End it without working on it; nothing happens where that has begun."""
        if self._start():
            self._finish(self._all(outcome))

    def _start(self) -> bool:
        """Whether it is the caller's to end."""
        with self._lock:
            first, self._started = not self._started, True
            return first

    def _all(self, outcome: Outcome) -> Sequence[Outcome]:
        return [outcome] * self._requests

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes
        self._work = _nothing
        self._ended.set()


class WorkThread:
    """Jobs one after the other, at most `max_jobs` and `max_bytes` of them waiting."""

    def __init__(self, name: str, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._waiting: deque[Job] = deque()
        self._running = False
        self._backlog_bytes = 0
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Waiting or being worked on."""
        return self._backlog_bytes

    def submit(self, job: Job) -> Job:
        """Takes the job; it ends at once as `busy` where too much waits already."""
        with self._changed:
            self._forget_ended()
            if self._closed:
                refusal = CLOSED
            elif (
                len(self._waiting) >= self._max_jobs
                or self._backlog_bytes + job.size_bytes > self._max_bytes
            ):
                refusal = BUSY
            else:
                self._waiting.append(job)
                self._backlog_bytes += job.size_bytes
                self._changed.notify_all()
                return job
        job.refuse(refusal)
        return job

    def drain(self, timeout_s: float) -> None:
        """Until nothing waits or runs, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def close(self) -> None:
        """What waits ends as `closed`; returns when the job that runs has ended. Idempotent."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.refuse(CLOSED)
            self._forget_ended()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running = False
                self._backlog_bytes -= job.size_bytes
                self._changed.notify_all()

    def _forget_ended(self) -> None:
        """Those that were cancelled where they waited; the lock is held."""
        for job in [job for job in self._waiting if job.ended]:
            self._waiting.remove(job)
            self._backlog_bytes -= job.size_bytes

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._running = True
            return self._waiting.popleft()


def _nothing(_: Job) -> Sequence[Outcome]:
    """Stands where the work was, so that its buffers are let go."""
    return ()
