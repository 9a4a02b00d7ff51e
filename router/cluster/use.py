"""Tenants' limits over all routers: what one lets through goes off the limits of the others too.

Names do not travel, keyed hashes of them do. What the bus loses was let through beyond the limit,
and what comes late too: at most a sync delay's worth.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from events.peer import Used
from router.tenancy.limits import Limits
from router.tenancy.tenants import Tenant, Tenants

TAG_BYTES = 8


class SharedUse:
    """Between the limits and what routers tell each other. Bounded by the number of tenants."""

    def __init__(self, key: bytes, tenants: Tenants, limits: Limits) -> None:
        self._key = key
        self._tenants = tenants
        self._limits = limits
        self._spent: dict[str, tuple[int, int]] = {}
        self._tags: dict[bytes, str] = {}
        self._wake: Callable[[], None] = lambda: None
        limits.on_spent(self._note)

    def __len__(self) -> int:
        return len(self._spent)

    def on_work(self, wake: Callable[[], None]) -> None:
        """Whom to tell that there is something to take."""
        self._wake = wake

    def take(self) -> tuple[Used, ...]:
        """What was let through since the last call."""
        spent, self._spent = self._spent, {}
        return tuple(Used(self._tag(name), *amounts) for name, amounts in spent.items())

    def hear(self, used: Iterable[Used]) -> None:
        """Another router's. Tenants that are not known here are left out."""
        for one in used:
            tenant = self._tenant(one.tenant)
            if tenant is not None:
                self._limits.account(tenant).spent_elsewhere(one.requests, one.tokens)

    def _note(self, name: str, requests: int, tokens: int) -> None:
        known = self._spent.get(name, (0, 0))
        self._spent[name] = known[0] + requests, known[1] + tokens
        self._wake()

    def _tag(self, name: str) -> bytes:
        return hmac.digest(self._key, b"wr-tenant-1\0" + name.encode(), "sha256")[:TAG_BYTES]

    def _tenant(self, tag: bytes) -> Tenant | None:
        if tag not in self._tags:
            everybody = [self._tenants.anonymous, *(of for of, _ in self._tenants.listed())]
            self._tags = {self._tag(tenant.name): tenant.name for tenant in everybody}
        return self._tenants.named(self._tags.get(tag, ""))
