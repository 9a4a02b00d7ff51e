"""What an order of service is. A policy orders, it never admits.

Ranks are set at intake and stay, but for the turns that a policy asks for as time goes by; so a
preempted request keeps its place. Victims are taken from the far end of the very same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from replica.sched.plan import ChildId

Rank = tuple[float, ...]
"""Smaller ranks are served first; ranks of different children must differ."""

UNRANKED: Rank = ()
"""Of a request that is refused at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a policy may know of a request when it comes. Clock times are monotonic.

    `weight`: the tenant's share beside others. `first_by_s`: when its first token is due, None for
    whenever. `prefill_ms` and `decode_ms` are
    what it will take of the device beyond what the cache holds (`hit_tokens`); `error` is how far
    off that may be, as a share; None while next to nothing was learnt.
    """

    child: ChildId
    tenant: str
    priority: int
    weight: float
    arrival_s: float
    first_by_s: float | None
    hit_tokens: int
    uncached_tokens: int
    prefill_ms: float
    decode_ms: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting request's new rank; None: its first token can't come in time any more."""

    child: ChildId
    rank: Rank | None


class Policy(Protocol):
    """One order. It hears of every request when it comes, when it is started and when it leaves.

    `by_priority`, `by_deadline`: by what a waiting request may take the place of a running one.
    """

    by_priority: bool
    by_deadline: bool

    def enter(self, task: Task) -> Rank:
        """The rank of a request that comes."""

    def refuses(self, task: Task, ahead_ms: float) -> bool:
        """Right after `enter`: whether it can't be in time, `ahead_ms` of prefill being before it.
        If so it has never entered."""

    def started(self, rank: Rank) -> None:
        """A request of that rank is served from now on."""

    def left(self, child: ChildId) -> None:
        """A request has ended, started or not; it has no turns any more. Idempotent."""

    def advance(self, now_s: float) -> Sequence[Turn]:
        """What the time changes, once per step."""


class StaticPolicy:
    """An order that time doesn't change, and in which nobody is too late."""

    by_priority = by_deadline = False

    def refuses(self, task: Task, ahead_ms: float) -> bool:
        """See Policy."""
        return False

    def started(self, rank: Rank) -> None:
        """See Policy."""

    def left(self, child: ChildId) -> None:
        """See Policy."""

    def advance(self, now_s: float) -> Sequence[Turn]:
        """See Policy."""
        return ()
