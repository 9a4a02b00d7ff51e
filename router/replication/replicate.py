"""Hot heads on more replicas, before requests must compute them there.

A head is brought to one more replica when requests are forced off those that hold it, or when these
serve more of it than their share and make it wait; when the replica that alone held it drains or
leaves; and when a replica joins. Each time only where it pays, in ms by the learnt rates, to a
replica where nothing waits, one at a time for each, behind all other work, and within a share of
the fleet's time. All it needs is found again in the next round, so nothing is lost when it stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from events.load import OWN_ENGINE
from events.output import Usage
from router.choice.choose import RouterBrain
from router.choice.route import RouteQuery
from router.choice.sheet import TERMS
from router.fleet.fleet import Fleet
from router.policies.base import Candidates
from router.replication.compute import HeadMover
from router.replication.copies import Copies, Order
from router.replication.heat import HeadHeat, HotHead
from router.serving.http import log_unexpected
from router.telemetry.alarms import Clock

ROUND_S = 0.5
HORIZON_S = 60.0
"""Traffic is taken to go on for so long."""

MARGIN = 2.0
"""What is gained must be so many times what it costs."""

FAIR_EXCESS = 1.5
HELD_SHARE = 0.9
BUSY_MS = 50.0
"""A replica where a request would wait longer gets nothing on top."""

JOIN_S = 10.0
JOIN_HEADS = 16
DIGEST_WAIT_S = 1.0
"""So long a replica that joined may take to say what it holds already."""

SAVED_UP_S = 60.0

_WAITING = [TERMS.index(name) for name in ("queue_ms", "overload_ms")]
_PREFILL = [TERMS.index("prefill_ms")]
_COST = [TERMS.index(name) for name in ("prefill_ms", "transfer_ms", "harm_ms", "eviction_ms")]

FORCED_OFF, FAIR_SHARE, LEFT, JOINED = "forced_off", "fair_share", "left", "joined"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a head is, and what it would cost elsewhere; `holds` is bool by candidate."""

    head: HotHead
    candidates: Candidates
    holds: np.ndarray

    @property
    def holders(self) -> list[str]:
        """Who takes requests and holds it."""
        return [self.candidates.replicas[place] for place in np.flatnonzero(self.holds).tolist()]

    def best(self, among: np.ndarray) -> int | None:
        """The place, of those, where it would cost least."""
        if not among.any():
            return None
        return int(np.where(among, self.candidates.scores, -np.inf).argmax())

    def waiting_ms(self, place: int) -> float:
        """How long a request would wait there."""
        return self._sum_ms(place, _WAITING)

    def prefill_ms(self, place: int) -> float:
        """What computing it there takes."""
        return self._sum_ms(place, _PREFILL)

    def cost_ms(self, place: int) -> float:
        """The same, with what it takes from others."""
        return self._sum_ms(place, _COST)

    def _sum_ms(self, place: int, terms: list[int]) -> float:
        return float(self.candidates.terms[place, terms].sum())


@dataclass(frozen=True, slots=True)
class _Joined:
    """A replica's new life, and the heads that were hot when it came."""

    since_s: float
    heads: frozenset[int]


class Budget:
    """Milliseconds of the fleet's time: `share` of it, some of which can be saved up. Where several
    routers do the same for one fleet, each has its part."""

    def __init__(self, share: float, clock: Clock) -> None:
        self.credit_ms = 1e3 * SAVED_UP_S * share
        self.spent_ms_total = 0.0
        self._share = share
        self._routers = 1
        self._clock = clock
        self._at_s = clock()

    def earn(self, replicas: int, routers: int = 1) -> None:
        """Time went by for so many. What was saved up is shared with routers that have come."""
        now_s = self._clock()
        if routers > self._routers and self.credit_ms > 0:
            self.credit_ms *= self._routers / routers
        self._routers = routers
        each_ms = 1e3 * self._share * replicas / routers
        earned_ms = each_ms * (now_s - self._at_s)
        limit_ms = each_ms * SAVED_UP_S
        self.credit_ms = min(max(limit_ms, self.credit_ms), self.credit_ms + earned_ms)
        self._at_s = now_s

    def spend(self, cost_ms: float) -> None:
        """May leave a debt: heads are of any length."""
        self.credit_ms -= cost_ms
        self.spent_ms_total += cost_ms


class Replicator:
    """Looks at the hot heads a few times a second and starts what pays."""

    def __init__(
        self,
        brain: RouterBrain,
        heat: HeadHeat,
        mover: HeadMover,
        share: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self.heat = heat
        self.budget = Budget(share, clock)
        self.copies = Copies(mover, clock, self._ended)
        self._brain = brain
        self._fleet: Fleet = brain.fleet
        self._clock = clock
        self._lives: dict[str, int] = {}
        self._ours: set[str] = set()
        self._joined: dict[str, _Joined] = {}
        self._held: dict[int, dict[str, int]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin the rounds."""
        self._task = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """End the rounds and all that is under way. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.copies.close()

    def round(self) -> None:
        """Look once; starts tasks."""
        self._follow_fleet(self.heat.heads)
        heads = self.heat.settle()
        self._forget(heads)
        for head in heads:
            if self.copies.full:
                break
            order = self._order(self.standing(head))
            if order is not None:
                self._start(order)

    def standing(self, head: HotHead) -> Standing:
        """Where the head is now."""
        candidates = self._brain.survey(
            RouteQuery(
                request_id="hot",
                attempt=1,
                tenant=head.tenant,
                pool=head.pool,
                chain=head.chain,
                prompt_tokens=head.tokens,
                max_tokens=1,
                block_tokens=head.block_tokens,
                adapter=head.adapter,
            )
        )
        return Standing(head, candidates, candidates.overlaps >= HELD_SHARE * head.blocks)

    async def _repeat(self) -> None:
        while True:
            try:
                self.round()
            except Exception as error:
                log_unexpected(error)
            self._wake.clear()
            try:
                async with asyncio.timeout(ROUND_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    # Who is there

    def _follow_fleet(self, heads: Sequence[HotHead]) -> None:
        """`heads` were hot before those came that are new now."""
        now_s = self._clock()
        members = [
            member
            for pool in self._fleet.pools()
            for member in self._fleet.members(pool)
            if member.unavailable(now_s) is None
        ]
        lives = {member.replica: member.boot for member in members}
        self._ours = {of.replica for of in members if of.hello.engine == OWN_ENGINE}
        hottest = frozenset(head.number for head in heads[:JOIN_HEADS])
        for replica, boot in lives.items():
            if self._lives.get(replica) != boot and hottest:
                self._joined[replica] = _Joined(now_s, hottest)
        for order in self.copies.running:
            if lives.get(order.replica) is None:
                self.copies.cancel(order.replica)
        self._lives = lives
        self.budget.earn(len(lives), 1 + len(self._brain.peers))

    def _forget(self, heads: Sequence[HotHead]) -> None:
        now_s = self._clock()
        numbers = {head.number for head in heads}
        self._held = {number: held for number, held in self._held.items() if number in numbers}
        self._joined = {
            replica: joined
            for replica, joined in self._joined.items()
            if now_s - joined.since_s < JOIN_S and replica in self._lives
        }

    # What pays

    def _order(self, standing: Standing) -> Order | None:
        joined = self._to_joined(standing)
        if joined is not None:
            return joined
        lost = self._is_lost(standing)
        head, excess = standing.head, self._excess(standing)
        if self.budget.credit_ms <= 0 or not (lost or excess or head.forced_off_per_s):
            return None
        target = self._target(standing)
        if target is None:
            return None
        if lost:
            return self._worth(standing, target, LEFT, head.requests_per_s)
        order = self._worth(standing, target, FORCED_OFF, head.forced_off_per_s)
        return self._unfair(standing, target) if order is None and excess else order

    def _excess(self, standing: Standing) -> bool:
        """Whether its holders are fewer than its share of all requests deserves."""
        deserved = standing.head.share * len(standing.candidates)
        return deserved > FAIR_EXCESS * int(standing.holds.sum()) > 0

    def _to_joined(self, standing: Standing) -> Order | None:
        """For a replica that joined and lacks it; its own time is all that it takes."""
        head, candidates, now_s = standing.head, standing.candidates, self._clock()
        for replica, joined in self._joined.items():
            known = self._fleet.index.known(replica) or now_s - joined.since_s > DIGEST_WAIT_S
            if head.number not in joined.heads or not known or replica not in candidates.replicas:
                continue
            place = candidates.replicas.index(replica)
            if not standing.holds[place] and self._may_take(head, replica):
                share = head.requests_per_s / len(candidates)
                order = self._worth(standing, place, JOINED, share)
                if order is not None:
                    return order
        return None

    def _is_lost(self, standing: Standing) -> bool:
        """Whether all those that held it a moment ago drain, or left. What was evicted was not
        worth its place; what is on its way is neither lost nor there."""
        number = standing.head.number
        if any(order.head.number == number for order in self.copies.running):
            return False
        if standing.holds.any():
            self._held[number] = {
                replica: self._lives[replica]
                for replica in standing.holders
                if replica in self._lives
            }
            return False
        held = self._held.get(number, {})
        if any(self._lives.get(replica) == boot for replica, boot in held.items()):
            del self._held[number]
            return False
        return bool(held)

    def _target(self, standing: Standing) -> int | None:
        free = ~standing.holds
        for place in np.flatnonzero(free).tolist():
            free[place] = self._may_take(standing.head, standing.candidates.replicas[place])
        return standing.best(free)

    def _may_take(self, head: HotHead, replica: str) -> bool:
        """A server of another kind takes no pinned requests of ours."""
        return replica in self._ours and self.copies.may_take(head, replica)

    def _unfair(self, standing: Standing, target: int) -> Order | None:
        """What a further holder's part of the requests would not wait any more."""
        holder = standing.best(standing.holds)
        if holder is None:
            return None
        part = standing.head.requests_per_s / (1 + int(standing.holds.sum()))
        shorter_ms = standing.waiting_ms(holder) - standing.waiting_ms(target) - BUSY_MS
        gain_ms = HORIZON_S * part * max(0.0, shorter_ms)
        return self._paying(standing, target, FAIR_SHARE, gain_ms)

    def _worth(
        self, standing: Standing, target: int, why: str, requests_per_s: float
    ) -> Order | None:
        """For requests that would compute it at the target."""
        gain_ms = HORIZON_S * requests_per_s * standing.prefill_ms(target)
        return self._paying(standing, target, why, gain_ms)

    def _paying(self, standing: Standing, target: int, why: str, gain_ms: float) -> Order | None:
        cost_ms = standing.cost_ms(target)
        if standing.waiting_ms(target) > BUSY_MS or gain_ms < MARGIN * cost_ms:
            return None
        return Order(standing.head, standing.candidates.replicas[target], why, cost_ms)

    # Doing it

    def _start(self, order: Order) -> None:
        if order.why != JOINED:
            self.budget.spend(order.cost_ms)
        self.copies.start(order)

    def _ended(self, order: Order, status: str, usage: Usage) -> None:
        """Put right what it was taken to cost, and see at once what comes next."""
        member = self._fleet.member(order.replica)
        if order.why == FORCED_OFF and status == "done":
            self.heat.relieve(order.head)
        if order.why != JOINED and status == "done" and member is not None:
            computed = usage.prompt_tokens - usage.cached_tokens
            really_ms = member.prefill.predict_ms(usage.cached_tokens, computed)
            self.budget.spend(really_ms - order.cost_ms)
        self._wake.set()
