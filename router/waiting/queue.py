"""Where requests wait while the fleet has enough to do: bounded, fair, and left without a trace.

While nobody waits and there is room, a request passes without waiting for anything. Else one is let
go at a time: its reservation is in the books before the next is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.errors import CoreError, UserError
from router.choice.choose import RouterBrain
from router.dispatch.job import Job
from router.tenancy.others import ALONE, Others
from router.tenancy.pace import DrainRate, retry_after_s
from router.tenancy.tenants import Tenant
from router.waiting.credit import Credit
from router.waiting.fair import Entry, FairQueue, anything
from router.waiting.held import Held

TICK_S = 0.02
"""Room appears with time, too: a backlog ages, a report comes."""
TENANT_SHARE = 0.5
"""Of the bounds: no tenant alone fills the queue. What it has waiting at other routers counts."""
OUTPUT_DISCOUNT = 0.25
"""A token that may be generated, in tokens of prefill: it is a guess, and shares its steps."""


class Patience(Protocol):
    """What is done every `every_s` while a request waits. An error of `show` ends its waiting."""

    every_s: float

    async def show(self) -> None: ...


class _Waiting(Entry):
    """A request with its caller."""

    def __init__(
        self, tenant: Tenant, jobs: Sequence[Job], tokens: int, brain: RouterBrain
    ) -> None:
        def price() -> float:
            return sum(_cost_tokens(job, brain) for job in jobs)

        first = jobs[0]
        new_tokens = sum(_new_tokens(job, brain) for job in jobs)
        super().__init__(
            tenant.name, tenant.policy.weight, first.priority, tokens, price, new_tokens
        )
        self.pool = first.pool
        self.deadline_s = first.ttft_due_ms(first.first_leg()) / 1000
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


async def _turn(entry: _Waiting, patience: Patience | None) -> None:
    while patience is not None:
        done, _ = await asyncio.wait((entry.turn,), timeout=patience.every_s)
        if done:
            break
        await patience.show()
    await entry.turn


def _cost_tokens(job: Job, brain: RouterBrain) -> float:
    return _new_tokens(job, brain) + _answer_tokens(job, brain)


def _new_tokens(job: Job, brain: RouterBrain) -> int:
    return brain.uncached_tokens(job.query(job.first_leg()))


def _answer_tokens(job: Job, brain: RouterBrain) -> float:
    answer = job.sampling.n * min(job.sampling.max_tokens, brain.output_tokens)
    return OUTPUT_DISCOUNT * answer


class _BusyClock:
    """Runs while somebody waits: only then does what leaves tell how fast it can."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        running_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return self._spent_s + running_s

    def run(self, busy: bool) -> None:
        if busy and self._since_s is None:
            self._since_s = self._clock()
        elif not busy and self._since_s is not None:
            self._spent_s, self._since_s = self(), None


class RequestQueue:
    """`held`: who waits, by the tokens that each counts for."""

    def __init__(
        self,
        brain: RouterBrain,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held = Held(config.max_queued_tokens, clock)
        self._brain = brain
        self._config = config
        self._clock = clock
        self._credit = Credit(
            brain.fleet, brain.ledger, config.prefill_ahead_ms, clock, brain.helpers
        )
        self._pools: dict[str, FairQueue] = {}
        self._own_requests: Counter[str] = Counter()
        self._own_tokens: Counter[str] = Counter()
        self._others = ALONE
        self._busy = _BusyClock(clock)
        self._drained = DrainRate(self._busy)
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None

    def share(self, others: Others) -> None:
        """With the other routers: a tenant's share of the queue is one over all of them."""
        self._others = others

    def placed(self, job: Job, decision: RouteDecision) -> None:
        """What it takes goes off its tenant's turns at the other routers."""
        if decision.attempt == 1 and not job.pin:
            new_tokens = decision.prompt_tokens - decision.predicted_cached_tokens
            self._others.worked(job.tenant, new_tokens + int(_answer_tokens(job, self._brain)))

    def worked_elsewhere(self, name: str, tokens: int) -> None:
        """Another router has placed so much for the tenant."""
        for queue in self._pools.values():
            queue.charge(name, tokens)

    def own(self, name: str) -> tuple[int, int]:
        """Requests of a tenant that wait here, and their tokens."""
        return self._own_requests.get(name, 0), self._own_tokens.get(name, 0)

    def names(self) -> list[str]:
        """Tenants of which something waits here."""
        return list(self._own_requests)

    @property
    def requests(self) -> int:
        """How many wait."""
        return len(self.held)

    @property
    def tokens(self) -> int:
        """What they count for."""
        return int(self.held.depth)

    @property
    def fullness(self) -> float:
        """How much of its bounds is taken, 0 to 1."""
        return max(
            self.requests / self._config.max_queued_requests, self.held.depth / self.held.limit
        )

    @property
    def waiting_pools(self) -> frozenset[str]:
        """Pools that somebody waits for."""
        return frozenset(self._pools)

    def passes(self, jobs: Sequence[Job]) -> bool:
        """Whether it is the request's turn at once: while nobody waits and there is room."""
        first = jobs[0]
        return bool(first.pin) or (not self._pools and self._credit.room(first.pool))

    async def wait(
        self, tenant: Tenant, jobs: Sequence[Job], tokens: int, patience: Patience | None = None
    ) -> float:
        """Until it is the request's turn; the seconds waited. Raises UserError (429) where the
        queue is full or the first token would come too late."""
        if self.passes(jobs):
            return 0.0
        began_s = self._clock()
        entry = _Waiting(tenant, jobs, tokens, self._brain)
        self._check(entry)
        self._add(entry)
        try:
            async with asyncio.timeout(entry.deadline_s):
                await _turn(entry, patience)
        except TimeoutError:
            raise self._refusal("deadline", self._drained.wait_s(self.tokens)) from None
        finally:
            queue = self._pools.get(entry.pool)
            if queue is not None and queue.remove(entry):
                self._left(entry)
        return self._clock() - began_s

    def pump(self) -> None:
        """Something may have become free."""
        if self._pools:
            self._soon()

    def expected_wait_s(self, entry: Entry, pool: str) -> float:
        """By its share of what leaves; 0 where that is not known yet."""
        rate, queue = self._drained.per_s(), self._pools.get(pool)
        if not rate or queue is None:
            return 0.0
        weights = sum(queue.weights(entry.priority))
        ahead_tokens = queue.ahead_tokens(entry) * max(1.0, weights / entry.weight)
        return min(ahead_tokens, self.tokens) / rate

    def _check(self, entry: _Waiting) -> None:
        """Raises UserError (429)."""
        over = self._excess_tokens(entry)
        if over is not None:
            raise self._refusal("full", self._drained.wait_s(over))
        late_s = self.expected_wait_s(entry, entry.pool) - entry.deadline_s
        if late_s > 0:
            raise self._refusal("deadline", late_s)

    def _excess_tokens(self, entry: Entry) -> int | None:
        """How much has to leave before it may wait; None when it may now. Somebody who has nothing
        waiting may always have one request wait, as far as the whole queue has room."""
        requests, tokens = self._config.max_queued_requests, self._config.max_queued_tokens
        own_requests, own_tokens = self.own(entry.tenant)
        others = self._others.elsewhere(entry.tenant)
        over = self.tokens + entry.tokens - tokens
        own_over = own_tokens + others.queued_tokens + entry.tokens - int(TENANT_SHARE * tokens)
        if self.requests and (over > 0 or self.requests >= requests):
            return max(over, entry.tokens)
        all_requests = own_requests + others.queued
        if own_requests and (own_over > 0 or all_requests >= TENANT_SHARE * requests):
            return max(own_over, entry.tokens)
        return None

    def _add(self, entry: _Waiting) -> None:
        self._pools.setdefault(entry.pool, FairQueue()).add(entry)
        self.held.add(entry, entry.tokens)
        self._own_requests[entry.tenant] += 1
        self._own_tokens[entry.tenant] += entry.tokens
        self._others.touched(entry.tenant)
        self._busy.run(True)
        self._soon()

    def _left(self, entry: _Waiting) -> None:
        if not self._pools[entry.pool]:
            del self._pools[entry.pool]
        self.held.remove(entry)
        self._own_requests[entry.tenant] -= 1
        self._own_tokens[entry.tenant] -= entry.tokens
        if not self._own_requests[entry.tenant]:
            del self._own_requests[entry.tenant], self._own_tokens[entry.tenant]
        self._others.touched(entry.tenant)
        self._busy.run(self.requests > 0)

    def _soon(self) -> None:
        """Look on the next turn of the loop."""
        if self._looking:
            return
        self._looking = True
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Let one go of each pool that has room; again once they have decided, or after a while."""
        self._looking, self._timer = False, None
        ready = [entry for pool in self._pools if (entry := self._next(pool)) is not None]
        for entry in ready:
            self._let_go(entry)
        if ready and self.requests:
            # Those let go are woken on the next turn, and decide on it or, with several prompts,
            # on the one after it.
            asyncio.get_running_loop().call_soon(self._soon)
        elif self.requests:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._look)

    def _next(self, pool: str) -> Entry | None:
        """Who goes now."""
        room = self._credit.room
        return self._pools[pool].pop(anything if room(pool) else partial(room, pool))

    def _let_go(self, entry: Entry) -> None:
        assert isinstance(entry, _Waiting)
        self._left(entry)
        self._drained.add(entry.tokens)
        if not entry.turn.done():
            entry.turn.set_result(None)

    def _refusal(self, reason: str, wait_s: float) -> UserError:
        self.held.refused[reason] += 1
        full = reason == "full"
        return UserError(
            CoreError(
                status=429,
                message="too many requests wait" if full else "every replica is too busy",
                type="server_error",
                code="overloaded",
                retry_after_s=retry_after_s(wait_s),
            ),
            "queue_tokens",
        )
