"""Who computes a prompt and who answers it: a pair where that costs less than one place for both.

Both ways are priced by the choice's own terms, in ms: the prompt at the one that computes (its
queue included), the blocks on their way through a store that both reach (that of another host too),
and what is left to do at the one that answers, against the best replica that would do everything.
Where answers were promised gaps that need it, what they wait for a prompt counts as well.
No await, no state but what was learnt of how long blocks take to be written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from events.load import DECODE, PREFILL
from router.choice.choose import RouterBrain
from router.choice.cost import TERMS
from router.choice.field import Field
from router.choice.roles import margin_ms
from router.choice.route import HandOff, RouteQuery
from router.fleet.member import Member
from router.fleet.stores import reads
from router.split.quota import DecodeQuota

SHORT, NOBODY_COMPUTES, NO_STORE, QUOTA, COLOCATED = (
    "short",
    "nobody_computes",
    "no_store",
    "decode_quota",
    "costs_more",
)
"""Why a request is not split: little of it must be computed, nobody is there to do that, no store
is shared, all that answer have enough on their way, or one place for both costs less."""

HOP_MS = 2.0
"""Two messages between router and replica, and a look into the store."""

TAIL_BLOCKS = 8
"""Blocks are written as they are computed: so many are left when the prompt is done."""

LEARNING_RATE = 0.2
MAX_STORES = 64
FORGET_S = 10.0
"""What was learnt of a store counts half after this: a slow one is not asked, and nothing is learnt
of whom one does not ask."""

_COST = [
    TERMS.index(name)
    for name in (
        "queue_ms", "prefill_ms", "transfer_ms", "decode_share_ms",
        "harm_ms", "eviction_ms", "overload_ms", "lateness_ms",
    )
]  # fmt: skip
_TTFT, _TRANSFER = map(TERMS.index, ("ttft_ms", "transfer_ms"))


@dataclass(frozen=True, slots=True)
class Pair:
    """`prefill` computes `blocks` leading blocks of the prompt within about `prefill_ms` and writes
    them to `store`, for `decode` most likely, which fetches them in `fetch_ms`. Costs of both ways,
    in ms."""

    prefill: str
    decode: str
    store: str
    blocks: int
    prefill_ms: float
    fetch_ms: float
    split_ms: float
    colocated_ms: float


@dataclass(frozen=True, slots=True)
class _Place:
    """One of those that could compute it."""

    member: Member
    cost_ms: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class _Late:
    """What hand-offs over a store took beyond their prefill, and when that was learnt."""

    ms: float
    at_s: float


class Pairing:
    """`min_tokens`: a prompt of which less must be computed is short. `always`: whatever can be
    handed off is, for comparison."""

    def __init__(
        self, brain: RouterBrain, quota: DecodeQuota, min_tokens: int, always: bool = False
    ) -> None:
        self._brain = brain
        self._quota = quota
        self.min_tokens = min_tokens
        self._always = always
        self._late: dict[str, _Late] = {}

    def splits(self, pool: str) -> bool:
        """Whether anybody there computes prompts for others."""
        found = self._brain.fleet.pools().get(pool)
        return found is not None and PREFILL in found.roles

    def plan(self, query: RouteQuery) -> Pair | str:
        """The pair, or why there is none."""
        blocks = (query.prompt_tokens - 1) // query.block_tokens
        if blocks * query.block_tokens < self.min_tokens:
            return SHORT
        alone = self._brain.survey(query)
        if not len(alone):
            return NOBODY_COMPUTES
        if query.prompt_tokens - _cached(alone) < self.min_tokens:
            return SHORT
        return self._best(query, blocks, math.inf if self._always else self._colocated_ms(alone))

    def learn(self, store: str, late_ms: float) -> None:
        """A hand-off over a store took so much longer than its prefill was to take."""
        known = self._late.get(store)
        if known is None and len(self._late) >= MAX_STORES:
            return
        before_ms = 0.0 if known is None else known.ms
        after_ms = max(0.0, before_ms + LEARNING_RATE * (late_ms - before_ms))
        self._late[store] = _Late(after_ms, self._brain.clock())

    def _best(self, query: RouteQuery, blocks: int, colocated_ms: float) -> Pair | str:
        """Of each store the cheapest that computes, with the cheapest that answers."""
        places = self._computing(query, blocks)
        if not places:
            return NOBODY_COMPUTES
        pairs, why = [], NO_STORE
        for store, place in _by_store(places):
            readers = self._readers(query, store)
            roomy = {m.replica for m in readers if self._quota.has_room(m, blocks)}
            if readers and not roomy:
                why = QUOTA
            if roomy:
                pairs.append(self._pair(query, blocks, store, place, roomy, colocated_ms))
        best = min(filter(None, pairs), key=lambda pair: pair.split_ms, default=None)
        if best is None:
            return COLOCATED if pairs else why
        return best if best.split_ms < colocated_ms else COLOCATED

    def _colocated_ms(self, alone: Field) -> float:
        """The least that one place for both costs; more by what its role is worth, where that is
        another one."""
        costs = _costs(alone)
        at = int(costs.argmin())
        member = self._brain.fleet.member(alone.replicas[at])
        strays = member is not None and member.hello.role in (PREFILL, DECODE)
        return float(costs[at]) + strays * margin_ms(alone.terms[at])

    def _computing(self, query: RouteQuery, blocks: int) -> list[_Place]:
        """Those that could compute it, cheapest first."""
        found = self._brain.survey(prefill_query(query, blocks))
        costs, ttfts = _costs(found).tolist(), found.terms[:, _TTFT].tolist()
        members = map(self._brain.fleet.member, found.replicas)
        places = [
            _Place(member, cost_ms, ttft_ms)
            for member, cost_ms, ttft_ms in zip(members, costs, ttfts, strict=True)
            if member is not None
        ]
        return sorted(places, key=lambda place: place.cost_ms)

    def _readers(self, query: RouteQuery, store: str) -> list[Member]:
        """Who answers, and reaches the store."""
        members = self._brain.fleet.members(query.pool)
        return [m for m in members if m.hello.role != PREFILL and reads(m, store)]

    def _pair(
        self,
        query: RouteQuery,
        blocks: int,
        store: str,
        place: _Place,
        roomy: set[str],
        colocated_ms: float,
    ) -> Pair | None:
        """None where none of those with room may be asked."""
        ready_ms = place.ttft_ms + self._written_ms(place.member, store)
        deadline_ms = query.ttft_deadline_ms
        answering = self._brain.survey(
            replace(
                query,
                hand_off=HandOff("split", place.member.replica, store, blocks),
                ttft_deadline_ms=None if deadline_ms is None else max(1.0, deadline_ms - ready_ms),
            )
        )
        costs = np.array(
            [
                cost if replica in roomy else np.inf
                for replica, cost in zip(
                    answering.replicas, _costs(answering).tolist(), strict=True
                )
            ]
        )
        if not np.isfinite(costs).any():
            return None
        at = int(costs.argmin())
        written_ms = ready_ms - place.ttft_ms
        return Pair(
            prefill=place.member.replica,
            decode=answering.replicas[at],
            store=store,
            blocks=blocks,
            prefill_ms=place.ttft_ms,
            fetch_ms=float(answering.terms[at, _TRANSFER]),
            split_ms=place.cost_ms + written_ms + HOP_MS + float(costs[at]),
            colocated_ms=colocated_ms,
        )

    def _written_ms(self, member: Member, store: str) -> float:
        """From the end of the prefill until all is in the store: as learnt, or as reading takes."""
        place, load = member.hello.tiers.index(store), member.load
        reading_ms = 0.0
        if load is not None and place < len(load.fetch):
            fit = load.fetch[place]
            reading_ms = fit.latency + TAIL_BLOCKS * fit.per_block
        late = self._late.get(store)
        if late is None:
            return reading_ms
        weight = float(np.exp2((late.at_s - self._brain.clock()) / FORGET_S))
        return reading_ms + weight * (late.ms - reading_ms)


def prefill_query(query: RouteQuery, blocks: int) -> RouteQuery:
    """For the leading blocks alone."""
    return replace(
        query, computes=True, prompt_tokens=blocks * query.block_tokens, max_tokens=1, hand_off=None
    )


def _by_store(places: list[_Place]) -> Iterator[tuple[str, _Place]]:
    """Each store once, with the first that writes to it."""
    seen = set()
    for place in places:
        for store in place.member.hello.tiers:
            if store and store not in seen:
                seen.add(store)
                yield store, place


def _costs(field: Field) -> np.ndarray:
    """What it costs at each, in ms."""
    costs: np.ndarray = field.terms[:, _COST].sum(axis=1) + field.delays_ms()
    return costs


def _cached(field: Field) -> int:
    """Tokens of the prompt that the cheapest need not compute."""
    return int(field.best.cached_tokens)
