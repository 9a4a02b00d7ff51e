"""Copies of hot heads under way: one for each replica at a time, each with a deadline."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from events.errors import UserError
from events.output import Usage
from router.dispatch.dispatch import NOTHING
from router.replication.compute import HeadMover
from router.replication.heat import HotHead
from router.serving.http import log_unexpected
from router.telemetry.alarms import Clock

DEADLINE_S = 20.0
AGAIN_AFTER_S = 30.0
"""Before the same head is tried on the same replica again, whatever came of it."""

MAX_AT_ONCE = 8
RECORDS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Order:
    """One head for one replica. `why`: "forced_off", "fair_share", "left" or "joined"."""

    head: HotHead
    replica: str
    why: str
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Record:
    """What became of an order. status: "done", "failed", "expired" or "cancelled"."""

    head: int
    replica: str
    why: str
    status: str
    tokens: int
    computed_tokens: int
    took_ms: float


OnEnd = Callable[[Order, str, Usage], None]
"""An order, its status, and what it computed: zeros unless it is "done"."""


class Copies:
    """Carries orders out. `totals` counts them by (why, status); `records` has the newest."""

    def __init__(self, mover: HeadMover, clock: Clock, on_end: OnEnd) -> None:
        self.records: deque[Record] = deque(maxlen=RECORDS_KEPT)
        self.totals: Counter[tuple[str, str]] = Counter()
        self.computed_tokens_total = 0
        self._mover = mover
        self._clock = clock
        self._on_end = on_end
        self._running: dict[str, tuple[Order, asyncio.Task[tuple[str, Usage]]]] = {}
        self._tried_until_s: dict[tuple[int, str], float] = {}

    @property
    def full(self) -> bool:
        """Whether no more may start now."""
        return len(self._running) >= MAX_AT_ONCE

    @property
    def running(self) -> list[Order]:
        """What is under way."""
        return [order for order, _ in self._running.values()]

    def may_take(self, head: HotHead, replica: str) -> bool:
        """Whether the head may be tried there now."""
        until_s = self._tried_until_s.get((head.number, replica), 0.0)
        return replica not in self._running and until_s <= self._clock()

    def start(self, order: Order) -> None:
        """Begin; `may_take` was asked before."""
        now_s = self._clock()
        tried = self._tried_until_s.items()
        self._tried_until_s = {key: until_s for key, until_s in tried if until_s > now_s}
        self._tried_until_s[order.head.number, order.replica] = now_s + AGAIN_AFTER_S
        task = asyncio.create_task(self._carry_out(order))
        self._running[order.replica] = order, task
        task.add_done_callback(partial(self._end, order, now_s))

    def cancel(self, replica: str) -> None:
        """Give up what is under way there."""
        if replica in self._running:
            self._running[replica][1].cancel()

    async def close(self) -> None:
        """Give up everything."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, order: Order) -> tuple[str, Usage]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return "done", await self._mover.bring(order.head, order.replica)
        except TimeoutError:
            return "expired", NOTHING
        except UserError:
            return "failed", NOTHING
        except Exception as error:
            log_unexpected(error)
            return "failed", NOTHING

    def _end(self, order: Order, began_s: float, task: asyncio.Task[tuple[str, Usage]]) -> None:
        """Called once for each order, even for one that was cancelled before it began."""
        del self._running[order.replica]
        status, usage = ("cancelled", NOTHING) if task.cancelled() else task.result()
        head, computed = order.head, usage.prompt_tokens - usage.cached_tokens
        took_ms = 1e3 * (self._clock() - began_s)
        self.computed_tokens_total += computed
        self.totals[order.why, status] += 1
        self.records.append(
            Record(head.number, order.replica, order.why, status, head.tokens, computed, took_ms)
        )
        self._on_end(order, status, usage)
