"""Blocks to prefill plus blocks in use, as Dynamo's KV router scores.

Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs`, with the defaults of
1.x: overlap credit 1, its decay off, prefill load scale 1, weight of active requests 0, blocks of
answers not tracked, temperature 0 (the least cost wins). Blocks in use are those of the prompts in
flight with the new one among them, each counted once (`ActiveSequences::potential_blocks`). Which
request has ended Dynamo's router hears; rules here don't: a replica's latest count, as many as it
has.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from kvstore.identity import BlockKey, KeyChain
from router.choice.route import RouteQuery
from router.policies.base import Candidate, Pick

OVERLAP_CREDIT = 1.0
PREFILL_SCALE = 1.0


class BlockCost:
    """cost = prefill blocks queued and new, less the overlap, plus active blocks; lowest wins.
    Remembers which prompts are in flight where."""

    name = "block_cost"

    def __init__(self) -> None:
        self._in_flight: dict[str, _InFlight] = {}

    def pick(self, query: RouteQuery, candidates: Sequence[Candidate], rng: random.Random) -> Pick:
        """The cheapest; ties at random."""
        keys = list(query.chain)
        costs = [self._cost(query, keys, candidate) for candidate in candidates]
        lowest = min(costs)
        cheapest = [c for c, cost in zip(candidates, costs, strict=True) if cost == lowest]
        return Pick(rng.choice(cheapest).replica, f"{lowest:.0f} blocks")

    def placed(self, query: RouteQuery, candidates: Sequence[Candidate], pick: Pick) -> None:
        """It is in flight there."""
        requests = next(c.requests for c in candidates if c.replica == pick.replica)
        self._in_flight.setdefault(pick.replica, _InFlight()).add(query.chain, requests)

    def _cost(self, query: RouteQuery, keys: Sequence[BlockKey], candidate: Candidate) -> float:
        queued = candidate.queued_prefill_tokens / query.block_tokens
        incoming = query.prompt_tokens / query.block_tokens
        prefill = max(0.0, queued + incoming - OVERLAP_CREDIT * candidate.overlap_blocks)
        there = self._in_flight.get(candidate.replica, _NOTHING)
        return PREFILL_SCALE * prefill + there.blocks_with(keys, candidate.requests)


class _InFlight:
    """One replica's latest prompts, the newest first, and how many of them have each block."""

    def __init__(self) -> None:
        self._chains: deque[KeyChain] = deque()
        self._holders: Counter[BlockKey] = Counter()

    def add(self, chain: KeyChain, requests: int) -> None:
        """One more beside so many; what is older has ended."""
        self._chains.appendleft(chain)
        self._holders.update(chain)
        while len(self._chains) > requests + 1:
            for key in self._chains.pop():
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]

    def blocks_with(self, keys: Sequence[BlockKey], requests: int) -> int:
        """Blocks of the latest `requests` prompts and of one with these keys, each once."""
        ended = Counter(key for chain in islice(self._chains, requests, None) for key in chain)
        used = len(self._holders) - sum(self._holders[key] == n for key, n in ended.items())
        return used + sum(self._holders[key] == ended[key] for key in keys)


_NOTHING = _InFlight()
