"""Loads from the tiers below, from a request's first wait to its landing."""

from __future__ import annotations

from replica.cache.prefix import PrefixCache
from replica.sched.ledger import Granted, Later, Ledger
from replica.sched.lifecycle import Lifecycle
from replica.sched.request import Request, State
from replica.sched.tiers import Wanted


class Loading:
    """Asks the tiers for what the device lacks; without tiers it never has anything to load.

    `under_way` counts loads, those of requests that have ended meanwhile included.
    """

    def __init__(self, ledger: Ledger, lifecycle: Lifecycle) -> None:
        self.under_way = 0
        self._ledger = ledger
        self._block_tokens = ledger.limits.block_tokens
        self._lifecycle = lifecycle
        self._cache: PrefixCache = lifecycle.cache

    def look_ahead(self, request: Request, hit_blocks: int) -> None:
        """The request queues: meanwhile blocks behind the device's hit may come nearer."""
        tiers = self._lifecycle.tiers
        if tiers is not None and hit_blocks < self._limit(request):
            tiers.look(self._wanted(request, hit_blocks))

    def waits(self, request: Request, hit_blocks: int) -> bool:
        """Whether blocks behind its hit are worth a load for which there is no room now."""
        return isinstance(self._ledger.load(self.under_way), Later) and self._pays(
            request, hit_blocks
        )

    def begin(self, request: Request) -> bool:
        """The request was admitted with its hit: whether it waits for blocks behind it first.

        Its destination blocks are its own from here on; it would need them anyway.
        """
        tiers, first = self._lifecycle.tiers, len(request.nodes)
        if tiers is None:
            return False
        if first:
            tiers.used(tuple(request.keys[:first]))
        room = isinstance(self._ledger.load(self.under_way), Granted)
        if not room or not self._pays(request, first):
            return False
        request.blocks += self._cache.allocate(self._limit(request) - first)
        request.transfers += 1
        self.under_way += 1
        self._lifecycle.table.move(request, State.LOADING)
        tiers.land(self._wanted(request, first), tuple(request.blocks[first:]))
        return True

    def end(self, request: Request) -> None:
        """Its destination blocks are written by nobody any more."""
        request.transfers -= 1
        self.under_way -= 1

    def _pays(self, request: Request, first: int) -> bool:
        tiers, count = self._lifecycle.tiers, self._limit(request) - first
        if tiers is None or not 0 < count <= self._cache.available:
            return False
        return tiers.worth(self._wanted(request, first))

    def _limit(self, request: Request) -> int:
        """Blocks that may come from a cache."""
        return min(len(request.keys), request.cache_limit // self._block_tokens)

    def _wanted(self, request: Request, first: int) -> Wanted:
        last = self._limit(request)
        tokens = request.tokens[first * self._block_tokens : last * self._block_tokens]
        spec = request.spec
        return Wanted(
            child=request.child,
            tenant=spec.tenant,
            salt=spec.salt,
            public_cut_blocks=spec.public_cut_blocks,
            first=first,
            chain=tuple(request.keys[:last]),
            tokens=tokens.tobytes(),
            adapter=spec.adapter,
        )
