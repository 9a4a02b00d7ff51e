"""One request's way in: the limits of its tenant, the bounds of the gateway, then its turn.

Everything is held by the request's Visit, so whoever leaves, at whatever stage, gives it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from aiohttp import web

from events.errors import UserError
from router.dispatch.job import Job
from router.serving.http import Request
from router.tenancy.degrade import MARK, Asked, degraded
from router.tenancy.gate import Admission, Gate
from router.tenancy.limits import Account, Limits
from router.tenancy.tenants import Tenant
from router.waiting.comebacks import Comebacks
from router.waiting.queue import Patience, RequestQueue

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""OpenAI's clients say how often they have asked already."""
DEGRADED_HEADER = "x-warmroute-degraded"


class Visit:
    """One request inside. What it holds is given back when the context manager is left, the last
    taken first, however it ends.

    `admission`: what it counts for, once admitted, of which `booked_tokens` went off its account.
    `answers`: what is entered last. `degraded`: what was made less of it."""

    __slots__ = (
        "_admitter", "account", "admission", "answers", "booked_tokens", "degraded", "tenant",
    )  # fmt: skip

    def __init__(self, admitter: Admitter, tenant: str, account: Account) -> None:
        self.tenant = tenant
        self.account = account
        self.admission: Admission | None = None
        self.booked_tokens: int | None = None
        self.answers: AbstractContextManager[object] | None = None
        self.degraded: tuple[str, ...] = ()
        self._admitter = admitter

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if self.answers is not None:
                self.answers.__exit__(None, None, None)
        finally:
            self._admitter.leave(self, error)


_VISIT = web.RequestKey("visit", Visit)


class Admitter:
    """Counts what was made less, by name, and the requests that clients repeated: all, and by the
    stage that had refused them."""

    def __init__(self, gate: Gate, limits: Limits, queue: RequestQueue) -> None:
        self.limits = limits
        self.queue = queue
        self.degraded: Counter[str] = Counter()
        self.client_retries = 0
        self.comebacks = Comebacks()
        self._gate = gate

    def enter(self, request: Request, tenant: Tenant) -> Visit:
        """Before the body is read. Raises UserError (429, 503)."""
        account = self.limits.account(tenant)
        self.limits.tallies.asked(tenant.name)
        if request.headers.get(RETRY_COUNT_HEADER, "0") != "0":
            self.client_retries += 1
            self.comebacks.came(tenant.name)
        visit = request[_VISIT] = Visit(self, tenant.name, account)
        account.enter()
        try:
            self._gate.enter(visit)
        except UserError as error:
            self._note_refusal(visit, error)
            account.leave()
            raise
        return visit

    def leave(self, visit: Visit, error: BaseException | None) -> None:
        """It has ended, with the error that refused it if one did."""
        account, admission = visit.account, visit.admission
        if error is not None:
            self._note_refusal(visit, error)
        if admission is not None:
            if visit.booked_tokens is not None:
                account.correct_tokens(admission.held_tokens - visit.booked_tokens)
            self._gate.left(admission)
            self.queue.pump()
        self._gate.leave(visit)
        account.leave()

    def _note_refusal(self, visit: Visit, error: BaseException) -> None:
        """At which stage it was."""
        if isinstance(error, UserError) and error.stage:
            self.comebacks.refused(visit.tenant, error.stage)

    def degrade(
        self, request: Request, tenant: Tenant, asked: Asked, room_tokens: int
    ) -> tuple[Asked, Tenant]:
        """What is served instead where much is waiting and the tenant's policy allows it."""
        if not tenant.policy.degrade or self.queue.fullness < MARK:
            return asked, tenant
        less = degraded(tenant, asked, room_tokens)
        request[_VISIT].degraded = less.names
        self.degraded.update(less.names)
        return less.asked, less.tenant

    async def admit(
        self,
        visit: Visit,
        tenant: Tenant,
        jobs: Sequence[Job],
        patience: Patience | None = None,
    ) -> Admission:
        """Before anything is sent: waits for the request's turn. Raises UserError (413, 429)."""
        account, queue = visit.account, self.queue
        booked = self._gate.expected_tokens(jobs)
        account.book_tokens(booked)
        try:
            admission = visit.admission = self._gate.admitted(jobs, booked)
            if not queue.passes(jobs):
                admission.waited_s = await queue.wait(tenant, jobs, booked, patience)
        except BaseException as error:
            account.correct_tokens(-booked)
            account.tally.refused["busy"] += isinstance(error, UserError)
            raise
        visit.booked_tokens = booked
        account.tally.wait.observe(admission.waited_s)
        admission.on_begin = queue.pump
        return admission


def limit_headers(request: Request) -> dict[str, str]:
    """x-ratelimit-* on the answers of tenants that have limits, and what was made less of the
    request."""
    visit = request.get(_VISIT)
    if visit is None:
        return {}
    said = visit.account.headers()
    if visit.degraded:
        said[DEGRADED_HEADER] = ", ".join(visit.degraded)
    return said


async def add_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler."""
    response.headers.update(limit_headers(request))
