"""Whose KV each replica holds: what it tells of those that hold most. Of one that does not tell, an
estimate: the last blocks that this router had computed there, as many as it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from events.decision import RouteDecision
from router.choice.route import Outcome
from router.fleet.fleet import Fleet
from router.tenancy.tags import TenantTags

MAX_RUNS = 4_096


class _Warm:
    """Runs of blocks of one tenant after another, the oldest first."""

    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()
        self._runs: deque[list] = deque()
        self._total = 0

    def add(self, tenant: str, blocks: int, room_blocks: int) -> None:
        if self._runs and self._runs[-1][0] == tenant:
            self._runs[-1][1] += blocks
        else:
            self._runs.append([tenant, blocks])
        self.blocks[tenant] += blocks
        self._total += blocks
        while self._total > room_blocks or len(self._runs) > MAX_RUNS:
            self._drop(max(self._total - room_blocks, 0))

    def _drop(self, excess: int) -> None:
        """So much of the oldest run; all of it where there are too many runs."""
        tenant, blocks = self._runs[0]
        gone = min(blocks, excess) or blocks
        self._runs[0][1] -= gone
        self._total -= gone
        self.blocks[tenant] -= gone
        if gone == blocks:
            self._runs.popleft()
        if not self.blocks[tenant]:
            del self.blocks[tenant]


class WarmShares:
    """By replica. Ends with a replica's life."""

    def __init__(self, fleet: Fleet, tags: TenantTags) -> None:
        self.tags = tags
        self._fleet = fleet
        self._warm: defaultdict[str, _Warm] = defaultdict(_Warm)
        fleet.on_fence(lambda replica: self._warm.pop(replica, None))

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """What an attempt computed is warm now."""
        member = self._fleet.member(decision.replica)
        if member is None or outcome.ttft_ms is None or not outcome.cached_told:
            return
        tokens = outcome.prompt_tokens - outcome.cached_tokens + outcome.completion_tokens
        blocks = tokens // member.hello.layout.block_tokens
        if blocks > 0:
            warm = self._warm[decision.replica]
            warm.add(decision.tenant, blocks, member.total_blocks)

    def of(self, tenant: str) -> dict[str, int]:
        """Blocks of the tenant by replica, the most first."""
        held = {replica: blocks[tenant] for replica, blocks in self._held()}
        return dict(sorted((item for item in held.items() if item[1]), key=lambda item: -item[1]))

    def totals(self) -> Counter[str]:
        """Blocks by tenant, over all replicas."""
        total: Counter[str] = Counter()
        for _, blocks in self._held():
            total.update(blocks)
        return total

    def _held(self) -> Iterator[tuple[str, Counter[str]]]:
        pools = self._fleet.pools()
        for member in (member for pool in pools for member in self._fleet.members(pool)):
            told = member.load.warm if member.load is not None else None
            if told is None:
                estimate = self._warm.get(member.replica)
                yield member.replica, Counter() if estimate is None else estimate.blocks
            else:
                yield member.replica, Counter({self._name(of.tenant): of.blocks for of in told})

    def _name(self, tag: bytes) -> str:
        tenant = self.tags.tenant(tag)
        return tag.hex() if tenant is None else tenant.name
