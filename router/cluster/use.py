"""Tenants' limits over all routers: what one lets through, has inside, or lets wait goes off the
limits of the others too, and what was computed for it at one off its turns at them.

Names do not travel, keyed hashes of them do. What the bus loses was let through beyond a limit a
minute, and what comes late too: at most a sync delay's worth. What is inside is told as it is, so
whatever was lost is mended by the next whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import add

from events.peer import Inside, Used
from router.cluster.peers import MAX_TENANTS, Peers
from router.tenancy.limits import Limits
from router.tenancy.others import NOTHING, Others
from router.tenancy.tags import TenantTags
from router.waiting.queue import RequestQueue


class SharedUse(Others):
    """Between limits and queue here, and what routers tell each other. Bounded by the number of
    tenants."""

    def __init__(self, tags: TenantTags, limits: Limits, queue: RequestQueue, peers: Peers) -> None:
        self._tags = tags
        self._limits = limits
        self._queue = queue
        self._peers = peers
        self._spent: dict[str, tuple[int, int, int]] = {}
        self._touched: set[str] = set()
        self._wake: Callable[[], None] = lambda: None
        limits.share(self)
        queue.share(self)

    def __len__(self) -> int:
        return len(self._spent)

    def on_work(self, wake: Callable[[], None]) -> None:
        """Whom to tell that there is something to take."""
        self._wake = wake

    def take(self) -> tuple[Used, ...]:
        """What was let through since the last call."""
        spent, self._spent = self._spent, {}
        return tuple(Used(self._tags.tag(name), *amounts) for name, amounts in spent.items())

    def take_inside(self) -> tuple[Inside, ...]:
        """What those tenants have here now of which it changed since the last call."""
        touched, self._touched = self._touched, set()
        return tuple(map(self._here, touched))

    def all_inside(self) -> tuple[Inside, ...]:
        """What every tenant has here now that has anything."""
        names = {name for name in self._limits.names() if self._limits.inside(name)}
        told = sorted(names.union(self._queue.names()))
        return tuple(map(self._here, told[:MAX_TENANTS]))

    def hear(self, used: Iterable[Used]) -> None:
        """Another router's. Tenants that are not known here are left out."""
        for one in used:
            tenant = self._tags.tenant(one.tenant)
            if tenant is not None:
                self._limits.account(tenant).spent_elsewhere(one.requests, one.tokens)
                self._queue.worked_elsewhere(tenant.name, one.work_tokens)

    def spent(self, name: str, requests: int, tokens: int) -> None:
        self._note(name, requests, tokens, 0)

    def worked(self, name: str, tokens: int) -> None:
        if not self._peers.alone:
            self._note(name, 0, 0, tokens)

    def _note(self, name: str, *amounts: int) -> None:
        requests, tokens, work = map(add, self._spent.get(name, (0, 0, 0)), amounts)
        self._spent[name] = requests, tokens, work
        self._wake()

    def touched(self, name: str) -> None:
        self._touched.add(name)
        self._wake()

    def elsewhere(self, name: str) -> Inside:
        if self._peers.alone:
            return NOTHING
        return self._peers.inside(self._tags.tag(name)) or NOTHING

    def _here(self, name: str) -> Inside:
        return Inside(self._tags.tag(name), self._limits.inside(name), *self._queue.own(name))
