"""One request's way in: the limits of its tenant, the bounds of the gateway, then its turn.

Everything is held by the request's ExitStack, so whoever leaves, at whatever stage, gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from aiohttp import web

from router.dispatch import Job
from router.gate import Admission, Gate
from router.limits import Account, Limits
from router.queue import RequestQueue
from router.tenants import Tenant

_ACCOUNT = web.RequestKey("account", Account)


class Admitter:
    """Keeps nothing itself."""

    def __init__(self, gate: Gate, limits: Limits, queue: RequestQueue) -> None:
        self.limits = limits
        self.queue = queue
        self._gate = gate

    def enter(self, held: ExitStack, request: web.Request, tenant: Tenant) -> None:
        """Before the body is read. Raises UserError (429, 503)."""
        account = self.limits.account(tenant)
        request[_ACCOUNT] = account
        held.enter_context(account.request(tenant.policy.max_concurrent))
        held.enter_context(self._gate.request())

    async def admit(self, held: ExitStack, tenant: Tenant, jobs: Sequence[Job]) -> Admission:
        """Before anything is sent: waits for the request's turn. Raises UserError (413, 429)."""
        account = self.limits.account(tenant)
        booked = self._gate.expected_tokens(jobs)
        account.book_tokens(booked)
        held.callback(self.queue.pump)
        try:
            admission = held.enter_context(self._gate.admitted(jobs))
            admission.waited_s = await self.queue.wait(tenant, jobs, booked)
        except BaseException:
            account.correct_tokens(-booked)
            raise
        admission.on_begin = self.queue.pump
        held.callback(lambda: account.correct_tokens(admission.held_tokens - booked))
        return admission


async def add_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: x-ratelimit-* on the answers of tenants that have limits."""
    account = request.get(_ACCOUNT)
    if account is not None:
        response.headers.update(account.headers())
