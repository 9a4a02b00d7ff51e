"""Making blocks resident on a replica: one-token requests pinned to it.

What a tier below the replica's device has, the replica fetches rather than computes, by its own
admission: a head moves through the shared store where that is cheaper. Whoever wants a head to be
somewhere knows a `HeadMover` only.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from msgspec.structs import replace

from events.decision import RouteDecision
from events.errors import CoreError, UserError
from events.output import Usage
from events.request import SamplingParams
from router.choice.route import Outcome
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.job import Job
from router.dispatch.jobs import JobMaker
from router.fleet.fleet import Fleet
from router.replication.heat import HotHead
from router.tenancy.tenants import Tenants

IDLE_S = 86_400.0
ONE_TOKEN = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
BACKGROUND_PRIORITY = -1_000
"""Behind everything that somebody waits for."""

BACKGROUND_TIMEOUT_S = 120.0
"""Not reached: whoever asks gives up before, and a replica is not blamed for what it put last."""


async def compute(job: Job, dispatcher: Dispatcher, budget: RetryBudget) -> Usage:
    """Run the job to its end, for its blocks alone. Raises UserError; cancelling it aborts it."""
    job = replace(job, request_id=f"warm-{secrets.token_hex(8)}")
    with Run(job, dispatcher, budget, 0) as run:
        while not run.done:
            usage = (await run.next(IDLE_S))[-1].usage
    return usage


class HeadMover(Protocol):
    """A way to have a head on one more replica."""

    async def bring(self, head: HotHead, replica: str) -> Usage:
        """Make it resident there; what was cached there already, and what was not.

        Raises UserError. Cancelling it stops the work at both ends; doing it again costs little."""


class Unheard:
    """A RouteListener for what is no traffic: its times and tokens are nobody's."""

    def decided(self, decision: RouteDecision) -> None:
        """Not counted."""

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        """Not counted."""

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """Not counted."""


class Recompute:
    """By a prefill at the target, in the scope of the head's owner and behind all other work."""

    def __init__(
        self, fleet: Fleet, tenants: Tenants, jobs: JobMaker, dispatcher: Dispatcher
    ) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._budget = RetryBudget()

    async def bring(self, head: HotHead, replica: str) -> Usage:
        """As HeadMover says."""
        return await compute(self._job(head, replica), self._dispatcher, self._budget)

    def _job(self, head: HotHead, replica: str) -> Job:
        """Made from the owner's name as of now. Other keys than the head's would warm nothing for
        its readers, or something for others: then the owner, its scope or the public prefixes have
        changed since."""
        tenant = self._tenants.named(head.tenant)
        pool = self._fleet.pools().get(head.pool)
        if tenant is None or pool is None:
            raise _outdated()
        model = head.adapter[0] if head.adapter is not None else ""
        job = self._jobs.make(
            "warm", tenant, head.prompt, ONE_TOKEN, pool, pin=replica, model=model
        )
        if job.chain.data != head.chain.data:
            raise _outdated()
        return replace(
            job,
            priority=BACKGROUND_PRIORITY,
            first_token_timeout_s=BACKGROUND_TIMEOUT_S,
            timeout_s=BACKGROUND_TIMEOUT_S,
            ttft_deadline_ms=None,
            itl_deadline_ms=None,
        )


def _outdated() -> UserError:
    return UserError(CoreError(status=409, message="this head is nobody's any more", code="gone"))
