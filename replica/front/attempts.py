"""The table of live attempts, and the only ways out of it.

An attempt lives from its registration, which comes before anything is submitted, until all its
children have ended and their last delta was taken by its outlet, or until the outlet is lost. The
engine knows children by ids that we mint; a client's or router's id is never a key of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from events.errors import DRAINING, CoreError, InvariantError
from events.output import FINISH_ABORT, FINISH_ERROR, CoreDelta
from replica.engine.messages import Engine
from replica.front.child import Child
from replica.front.fence import Fence, RequestKey
from replica.front.mailbox import Mailbox
from replica.front.metrics import FrontCounters
from replica.sched.plan import ChildId
from replica.sched.refusals import slow_reader


class Outlet(Protocol):
    """Where the deltas of an attempt go (a link). Compared by identity."""

    def wake(self, attempt: Attempt) -> None:
        """The attempt's mailbox holds deltas; must return at once."""


class AttemptKey(NamedTuple):
    """How a link's frames name an attempt: two routers may use the same request id."""

    outlet: Outlet
    request_id: str
    attempt: int


class HoldReason(Enum):
    """Who wants an attempt not to be scheduled; it runs again when nobody does."""

    ROUTER = "router"
    MAILBOX = "mailbox"


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of one request. `children` holds those that have not ended."""

    key: AttemptKey
    request: RequestKey
    prompt_tokens: int
    stop_token_ids: frozenset[int]
    received_s: float
    mailbox: Mailbox
    children: dict[ChildId, Child] = field(default_factory=dict)
    holds: set[HoldReason] = field(default_factory=set)
    slow_timer: asyncio.TimerHandle | None = None
    deadline_timer: asyncio.TimerHandle | None = None


LEAVING = CoreError(
    status=503,
    type="server_error",
    code=DRAINING,
    message="The replica is shutting down.",
    retry_after_s=1.0,
    reroute=True,
)
DEADLINE = CoreError(
    status=504, type="server_error", code="deadline", message="The request's deadline has passed."
)


class Attempts:
    """Owner of attempts and children; runs on the event loop only.

    `slow_s`: how long a full mailbox may stay above its high water before its attempt is ended.
    `most_bytes`: what all mailboxes together may hold before those with more than their share of it
    count as full.
    """

    def __init__(
        self,
        engine: Engine,
        counters: FrontCounters,
        slow_s: float,
        most_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.waiting_bytes = 0
        self._most_bytes = most_bytes
        self._engine = engine
        self._counters = counters
        self._slow_s = slow_s
        self._clock = clock
        self.fence = Fence(clock)
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._children: dict[ChildId, Child] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    @property
    def live_children(self) -> int:
        """Children that have not ended."""
        return len(self._children)

    @property
    def schedulable(self) -> bool:
        """Whether the engine has work of ours that nobody holds back."""
        return any(attempt.children and not attempt.holds for attempt in self)

    @property
    def held(self) -> int:
        """Attempts whose reader is too slow for now."""
        return sum(HoldReason.MAILBOX in attempt.holds for attempt in self)

    @property
    def oldest_age_s(self) -> float:
        """For how long the oldest delta has waited to be taken."""
        moments = [moment for a in self if (moment := a.mailbox.oldest_s) is not None]
        return max(0.0, self._clock() - min(moments)) if moments else 0.0

    def find(self, key: AttemptKey) -> Attempt | None:
        """The live attempt of this key."""
        return self._attempts.get(key)

    def child(self, child_id: ChildId) -> Child | None:
        """A child that has not ended."""
        return self._children.get(child_id)

    def register(self, attempt: Attempt, deadline_s: float) -> None:
        """Into the table, children and all; ended with an error after `deadline_s` seconds."""
        if attempt.key in self._attempts:
            raise InvariantError("an attempt is registered twice")
        self._attempts[attempt.key] = attempt
        self._children.update(attempt.children)
        self.fence.begin(attempt)
        self._empty.clear()
        attempt.deadline_timer = asyncio.get_running_loop().call_later(
            deadline_s, self.end, attempt, FINISH_ERROR, DEADLINE
        )

    def deliver(self, child: Child, delta: CoreDelta) -> None:
        """Queue a delta of a live child; one with a finish ends the child."""
        attempt = child.attempt
        if delta.finish is not None:
            del attempt.children[child.id], self._children[child.id]
            self._counters.finished(delta.finish, child.ttft_s)
        self._put(attempt.mailbox, delta)
        self.fence.note(attempt, delta)
        if not attempt.children:
            self.fence.end(attempt)
        if attempt.children and self._too_full(attempt.mailbox):
            self._hold_slow(attempt)
        attempt.key.outlet.wake(attempt)

    def end(self, attempt: Attempt, reason: str, error: CoreError | None = None) -> None:
        """End what still lives of an attempt, here and in the engine. Idempotent."""
        for child in tuple(attempt.children.values()):
            self._engine.abort(child.id)
            self.deliver(child, child.close(reason, error, self._clock()))

    def refuse(self, attempt: Attempt, error: CoreError) -> None:
        """End an attempt of which nothing was submitted yet."""
        if attempt.children:
            self._counters.refuse(error.code or "refused")
            self.end(attempt, FINISH_ERROR, error)

    def hold(self, attempt: Attempt, reason: HoldReason) -> None:
        """Schedule nothing of it until nobody holds it any more."""
        if not attempt.holds:
            for child_id in attempt.children:
                self._engine.hold(child_id)
        attempt.holds.add(reason)

    def resume(self, attempt: Attempt, reason: HoldReason) -> None:
        """Undo one hold."""
        if reason not in attempt.holds:
            return
        attempt.holds.remove(reason)
        if not attempt.holds:
            for child_id in attempt.children:
                self._engine.resume(child_id)

    def _put(self, mailbox: Mailbox, delta: CoreDelta) -> None:
        before = mailbox.bytes
        self._counters.deltas += 1
        self._counters.deltas_merged += mailbox.put(delta, self._clock())
        self.waiting_bytes += mailbox.bytes - before

    def _too_full(self, mailbox: Mailbox) -> bool:
        return mailbox.full or self._crowding(mailbox)

    def _crowding(self, mailbox: Mailbox) -> bool:
        """Whether too much waits in all, and here more than a fair share of what may."""
        crowded = self.waiting_bytes > self._most_bytes
        return crowded and mailbox.bytes * len(self._attempts) > self._most_bytes

    def taken(self, attempt: Attempt, freed_bytes: int) -> None:
        """The outlet took deltas out of the mailbox: there is room, or all is said."""
        self.waiting_bytes -= freed_bytes
        roomy = attempt.mailbox.low and not self._crowding(attempt.mailbox)
        if roomy and attempt.slow_timer is not None:
            attempt.slow_timer.cancel()
            attempt.slow_timer = None
            self.resume(attempt, HoldReason.MAILBOX)
        if not attempt.children and not len(attempt.mailbox):
            self._forget(attempt)

    def drop_outlet(self, outlet: Outlet) -> int:
        """The outlet is lost: abort all its attempts, deliver nothing. Returns how many."""
        lost = [attempt for attempt in self if attempt.key.outlet is outlet]
        for attempt in lost:
            for child in tuple(attempt.children.values()):
                self._engine.abort(child.id)
                del self._children[child.id]
                self._counters.finish(FINISH_ABORT)
            attempt.children.clear()
            self.fence.drop(attempt)
            self._forget(attempt)
        return len(lost)

    def send_away(self) -> None:
        """End what still lives: another replica may go on with it."""
        for attempt in tuple(self):
            self.end(attempt, FINISH_ERROR, LEAVING)

    async def drained(self) -> None:
        """Returns once no attempt is left."""
        await self._empty.wait()

    def _hold_slow(self, attempt: Attempt) -> None:
        if attempt.slow_timer is None:
            self.hold(attempt, HoldReason.MAILBOX)
            self._counters.mailbox_holds += 1
            attempt.slow_timer = asyncio.get_running_loop().call_later(
                self._slow_s, self._expire_slow, attempt
            )

    def _expire_slow(self, attempt: Attempt) -> None:
        self._counters.mailbox_aborts += bool(attempt.children)
        self.end(attempt, FINISH_ERROR, slow_reader())

    def _forget(self, attempt: Attempt) -> None:
        for timer in (attempt.slow_timer, attempt.deadline_timer):
            if timer is not None:
                timer.cancel()
        self.waiting_bytes -= attempt.mailbox.bytes
        del self._attempts[attempt.key]
        if not self._attempts:
            self._empty.set()
