"""Batches under way: handles whose cancel returns once no buffer is referenced, and the thread that
works on them in order. Every tier with a thread of its own uses these."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Condition, Thread

from kvstore.tier import BUSY, CANCELLED, CLOSED, LATE, Outcome, failed
from kvstore.transfer import End, Ending, Transfer

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
    before each block. What blocks in a call that `stopping` can't end (a socket) does so within
    `touch(interrupt)`. `size_bytes` counts against the thread's backlog.

    It is a Transfer with outcomes: it ends once, and only when no buffer of it is touched.
    """

    def __init__(
        self,
        work: Callable[[Job], Sequence[Outcome]],
        requests: int,
        deadline: float,
        size_bytes: int = 0,
    ) -> None:
        self.size_bytes = size_bytes
        self._work = work
        self._requests = requests
        self._transfer = Transfer(deadline)
        self._outcomes: Sequence[Outcome] | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over: nobody touches its buffers any more."""
        return self._transfer.ending is not None

    @property
    def deadline(self) -> float:
        """On the monotonic clock."""
        return self._transfer.deadline

    @property
    def stopping(self) -> Outcome | None:
        """How the rest of the batch ends when it must not go on; None while it may."""
        asked = self._transfer.asked
        return None if asked is None else _outcome(asked)

    def touch(self, interrupt: Callable[[], None]) -> AbstractContextManager[bool]:
        """Within the work, around a blocking call: see Transfer.touch."""
        return self._transfer.touch(interrupt)

    def result(self, timeout_s: float) -> Sequence[Outcome]:
        """One outcome per request, in order. Raises TimeoutError while it has not ended."""
        ending = self._transfer.wait(timeout_s)
        if ending is None:
            raise TimeoutError("the batch has not ended")
        return self._outcomes or [_outcome(ending)] * self._requests

    def cancel(self) -> None:
        """Returns only when no buffer of the batch is referenced any more."""
        self._transfer.end(End.CANCELLED)
        self._transfer.wait()

    def run(self) -> None:
        """Work on it now, in this thread; it has ended then, whatever happened."""
        with self._transfer.touch() as allowed:
            if allowed:
                self._outcomes = self._worked()
                self._transfer.end(End.DONE)
        self._work = _nothing

    def refuse(self, outcome: Outcome) -> None:
        """End it; what is being worked on stops as soon as it can."""
        self._transfer.end(End.FAILED, outcome.reason)

    def _worked(self) -> Sequence[Outcome]:
        try:
            return self._work(self)
        except Exception:
            # A fault of ours must not cost the engine more than a miss, nor the thread its life.
            log.exception("a batch of KV blocks failed")
            return [failed("fault")] * self._requests


class WorkThread:
    """Jobs one after the other, at most `max_jobs` and `max_bytes` of them waiting."""

    def __init__(self, name: str, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
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
            self._changed.wait_for(lambda: not self._waiting and self._job is None, timeout_s)

    def close(self) -> None:
        """What waits or runs ends as `closed`; returns when the thread has. Idempotent."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *([self._job] if self._job else ())):
                job.refuse(CLOSED)
            self._forget_ended()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._job = None
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
            self._job = self._waiting.popleft()
            return self._job


def _outcome(ending: Ending) -> Outcome:
    if ending.how is End.CANCELLED:
        return CANCELLED
    return LATE if ending.how is End.EXPIRED else failed(ending.reason)


def _nothing(_: Job) -> Sequence[Outcome]:
    """Stands where the work was, so that its buffers are let go."""
    return ()
