"""Copies of some requests to a revision that answers nobody: how would it have done?

A copy is rendered and sent as if it were its own, one step behind what tenants wait for; its
answer is dropped as it comes. It counts for no tenant and holds up no request.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from events.errors import UserError
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.job import Job
from router.revisions.revisions import Revision, Revisions
from router.serving.http import log_unexpected

MAX_COPIES = 16
COPY_S = 120.0
IDLE_S = 86_400.0
MIRROR_PRIORITY = -101
"""Behind every tenant."""


class HasJobs(Protocol):
    """A request as a revision takes it."""

    @property
    def jobs(self) -> Sequence[Job]: ...


Make = Callable[[Revision], Awaitable[HasJobs]]
"""Raises UserError."""


class Mirror:
    """`totals` counts copies by (revision, how they ended)."""

    def __init__(self, revisions: Revisions, rng: random.Random | None = None) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self._revisions = revisions
        self._rng = rng or random.Random()
        self._copies: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._copies)

    def offer(self, live: Revision, make: Make) -> None:
        """A request was taken by `live`: the others may get a copy."""
        for revision in self._revisions.others.values():
            if revision is live or self._rng.random() >= revision.share.mirror:
                continue
            if len(self._copies) >= MAX_COPIES:
                self.totals[revision.name, "skipped"] += 1
                continue
            copy = asyncio.create_task(self._copy(revision, make))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def close(self) -> None:
        """Give up all copies."""
        copies = list(self._copies)
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)

    async def _copy(self, revision: Revision, make: Make) -> None:
        status = "failed"
        try:
            async with asyncio.timeout(COPY_S):
                for job in (await make(revision)).jobs:
                    await _answer(revision, job)
            status = "done"
        except (UserError, TimeoutError):
            pass
        except Exception as error:
            log_unexpected(error)
        self.totals[revision.name, status] += 1


async def _answer(revision: Revision, job: Job) -> None:
    job = replace(job, request_id=f"mirror-{job.request_id}", priority=MIRROR_PRIORITY)
    with Run(job, revision.mirror_dispatcher, RetryBudget(), 0) as run:
        while not run.done:
            await run.next(IDLE_S)
