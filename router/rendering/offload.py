"""Work that would stall the event loop: done in a thread, bounded, with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from events.errors import CoreError, UserError
from router.waiting.held import Held

T = TypeVar("T")

_BUSY = CoreError(
    status=429,
    message="Too much text is waiting to be tokenised. Please try again shortly.",
    type="rate_limit_error",
    code="queue_full",
    retry_after_s=1.0,
)
_LATE = CoreError(
    status=503,
    message="The prompt could not be tokenised in time. Please try again shortly.",
    type="server_error",
    code="timeout",
    retry_after_s=1.0,
)


class Offload:
    """`max_pending` bounds the summed sizes of what waits or runs, in whatever unit callers use."""

    def __init__(self, executor: Executor, max_pending: int, timeout_s: float) -> None:
        self._executor = executor
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.held = Held(max_pending)

    async def run(self, size: int, work: Callable[[threading.Event], T]) -> T:
        """The result of `work(stopped)`; long work looks at `stopped` now and then.

        Raises UserError 429 when too much is pending, 503 past the deadline. Cancelling, or the
        deadline, takes waiting work out of the queue and tells running work to stop.
        """
        stopped = threading.Event()
        self._book(stopped, size)
        try:
            future = self._executor.submit(work, stopped)
        except RuntimeError:
            self._release(stopped)
            raise
        # The size is given back when the thread is really through, not when the caller left.
        future.add_done_callback(lambda _: self._release(stopped))
        return await self._wait(future, stopped)

    async def _wait(self, future: Future[T], stopped: threading.Event) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise UserError(_LATE) from None
        finally:
            stopped.set()

    def _book(self, work: threading.Event, size: int) -> None:
        with self._lock:
            if not self.held.fits(size):
                self.held.refused["full"] += 1
                raise UserError(_BUSY, "tokenise")
            self.held.add(work, size)

    def _release(self, work: threading.Event) -> None:
        with self._lock:
            self.held.remove(work)
