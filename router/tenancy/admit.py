"""One request's way in: the limits of its tenant, the bounds of the gateway, then its turn.

Everything is held by the request's Releases, so whoever leaves, at whatever stage, gives it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aiohttp import web
from msgspec import Struct

from events.errors import UserError
from router.dispatch.job import Job
from router.serving.http import Request
from router.tenancy.degrade import MARK, Asked, degraded
from router.tenancy.gate import Admission, Gate
from router.tenancy.limits import Account, Limits
from router.tenancy.tenants import Tenant
from router.waiting.comebacks import Comebacks
from router.waiting.queue import Patience, RequestQueue
from router.waiting.releases import Releases

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""OpenAI's clients say how often they have asked already."""
DEGRADED_HEADER = "x-warmroute-degraded"


class _Standing(Struct):
    """Of one request: its tenant, whose account, and what was made less of it."""

    tenant: str
    account: Account
    degraded: tuple[str, ...] = ()


_STANDING = web.RequestKey("standing", _Standing)


class Refusals:
    """Notes at which stage a request was refused. Use as a context manager."""

    __slots__ = ("_comebacks", "_request")

    def __init__(self, request: web.Request, comebacks: Comebacks) -> None:
        self._request = request
        self._comebacks = comebacks

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, UserError) and error.stage:
            self._comebacks.refused(self._request[_STANDING].tenant, error.stage)


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

    def enter(self, held: Releases, request: Request, tenant: Tenant) -> None:
        """Before the body is read. Raises UserError (429, 503)."""
        account = self.limits.account(tenant)
        self.limits.tallies.asked(tenant.name)
        if request.headers.get(RETRY_COUNT_HEADER, "0") != "0":
            self.client_retries += 1
            self.comebacks.came(tenant.name)
        request[_STANDING] = _Standing(tenant.name, account)
        held.enter(account.request())
        held.enter(self._gate.request())

    def noting(self, request: web.Request) -> Refusals:
        """Leave it with the error that refuses the request, if one does."""
        return Refusals(request, self.comebacks)

    def degrade(
        self, request: Request, tenant: Tenant, asked: Asked, room_tokens: int
    ) -> tuple[Asked, Tenant]:
        """What is served instead where much is waiting and the tenant's policy allows it."""
        if not tenant.policy.degrade or self.queue.fullness < MARK:
            return asked, tenant
        less = degraded(tenant, asked, room_tokens)
        request[_STANDING].degraded = less.names
        self.degraded.update(less.names)
        return less.asked, less.tenant

    async def admit(
        self,
        held: Releases,
        tenant: Tenant,
        jobs: Sequence[Job],
        patience: Patience | None = None,
    ) -> Admission:
        """Before anything is sent: waits for the request's turn. Raises UserError (413, 429)."""
        account = self.limits.account(tenant)
        booked = self._gate.expected_tokens(jobs)
        account.book_tokens(booked)
        held.add(self.queue.pump)
        try:
            admission = held.enter(self._gate.admitted(jobs))
            admission.waited_s = await self.queue.wait(tenant, jobs, booked, patience)
        except BaseException as error:
            account.correct_tokens(-booked)
            account.tally.refused["busy"] += isinstance(error, UserError)
            raise
        account.tally.wait.observe(admission.waited_s)
        admission.on_begin = self.queue.pump
        held.add(lambda: account.correct_tokens(admission.held_tokens - booked))
        return admission


def limit_headers(request: Request) -> dict[str, str]:
    """x-ratelimit-* on the answers of tenants that have limits, and what was made less of the
    request."""
    standing = request.get(_STANDING)
    if standing is None:
        return {}
    said = standing.account.headers()
    if standing.degraded:
        said[DEGRADED_HEADER] = ", ".join(standing.degraded)
    return said


async def add_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler."""
    response.headers.update(limit_headers(request))
