"""Whose turn it is: deficit round robin over tenants, and over the sizes of prompts within each.

Higher priorities go first; within one, every tenant gets prefill work in proportion to its weight,
however many requests it has waiting, and each size of its prompts an equal part of that: no flood
of long ones keeps a short one waiting, nor the other way round. Equals go in the order of their
arrival. A request is priced when it goes, for by then what it shares with those before it may be
warm: so a flow goes while it is in credit and owes what it took beyond it (surplus round robin).
Who has asked for nothing lately owes nothing, and goes at once.

There may be room for some sizes only. Then who is in credit and fits passes who does not; but no
round begins before all who are in credit have gone, so passing brings nobody more than its share.
Pure data, no clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from router.choice.reserve import SIZES, size_of

QUANTUM_TOKENS = 512.0
"""What a tenant of weight 1 is given each round, and a size within a tenant."""
LEAST_COST_TOKENS = 1.0
SMALL_TOKENS = 64
SIZE_TOKENS = tuple(2 * SMALL_TOKENS * 4**size for size in range(SIZES))
"""A prompt of each size: the first ends at 4 * SMALL_TOKENS, each other one at 4 times as many."""

MAX_OWED_TOKENS = 64 * QUANTUM_TOKENS
"""For work elsewhere, at weight 1: what is beyond it is forgiven, so that nobody waits for long for
what he had at a router that is gone."""

Fits = Callable[[int], bool]
"""Whether there is room for a prompt of that size."""


class Entry:
    """One request that waits. `tokens` is what it counts for in bounds, `price` tells what it
    would cost now, in tokens of prefill. Its size is that of the `new_tokens` of its prompt that
    had to be computed when it came."""

    __slots__ = ("price", "priority", "size", "tenant", "tokens", "weight")

    def __init__(
        self,
        tenant: str,
        weight: float,
        priority: int,
        tokens: int,
        price: Callable[[], float],
        new_tokens: float,
    ) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority = priority
        self.tokens = tokens
        self.price = price
        self.size = size_of(new_tokens / SMALL_TOKENS)


def anything(size: int) -> bool:
    """There is room for all sizes."""
    return True


class _Flow(ABC):
    """What takes turns with others. An empty one is kept through the round, and while it owes."""

    __slots__ = ("credit_tokens", "tokens", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.waiting = 0
        self.tokens = 0
        self.weight = weight
        self.credit_tokens = 0.0
        self.give(1)

    def add(self, entry: Entry) -> None:
        self.waiting += 1
        self.tokens += entry.tokens

    @abstractmethod
    def take(self, fits: Fits) -> tuple[Entry, float] | None:
        """Who goes, and its price; None where nobody may."""

    def left(self, entry: Entry) -> None:
        self.waiting -= 1
        self.tokens -= entry.tokens

    def give(self, rounds: int) -> None:
        self.credit_tokens += rounds * QUANTUM_TOKENS * self.weight

    def charge(self, tokens: float) -> None:
        """For work elsewhere."""
        least = min(self.credit_tokens, -MAX_OWED_TOKENS * self.weight)
        self.credit_tokens = max(least, self.credit_tokens - tokens)

    def rounds_owed(self) -> int:
        """Until it is in credit."""
        return math.floor(-self.credit_tokens / (QUANTUM_TOKENS * self.weight)) + 1


F = TypeVar("F", bound=_Flow)


class _Turns(Generic[F]):
    """Flows in the order in which they go: newcomers first, those that owe last."""

    def __init__(self) -> None:
        self.flows: OrderedDict[Hashable, F] = OrderedDict()

    def enter(self, key: Hashable, flow: F) -> F:
        self.flows[key] = flow
        self.flows.move_to_end(key, last=False)
        return flow

    def waiting(self) -> Iterator[F]:
        """Those of which something waits."""
        return (flow for flow in self.flows.values() if flow.waiting)

    def take(self, fits: Fits) -> tuple[Entry, float] | None:
        """Who goes, and its price; None while it is the turn of those that don't fit."""
        while True:
            owing = True
            for key, flow in self._in_turn():
                if flow.waiting and flow.credit_tokens > 0:
                    taken = flow.take(fits)
                    if taken is not None:
                        self._pay(key, flow, *taken)
                        return taken
                    owing = False
            if not owing or not any(self.waiting()):
                return None
            self._next_round()

    def _in_turn(self) -> Iterable[tuple[Hashable, F]]:
        return self.flows.items()

    def _pay(self, key: Hashable, flow: F, entry: Entry, price: float) -> None:
        flow.left(entry)
        flow.credit_tokens -= price
        if flow.credit_tokens <= 0:
            self.flows.move_to_end(key)

    def _next_round(self) -> None:
        """Or as many of them as nobody could go in."""
        rounds = min(flow.rounds_owed() for flow in self.waiting())
        for key, flow in list(self.flows.items()):
            flow.give(rounds)
            if not flow.waiting and flow.credit_tokens > 0:
                del self.flows[key]


class _Size(_Flow):
    """The prompts of one size of one tenant."""

    __slots__ = ("entries", "size")

    def __init__(self, size: int) -> None:
        super().__init__(1.0)
        self.size = size
        self.entries: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.entries[entry] = None

    def take(self, fits: Fits) -> tuple[Entry, float] | None:
        if not fits(self.size):
            return None
        entry = next(iter(self.entries))
        return entry, max(LEAST_COST_TOKENS, entry.price())

    def left(self, entry: Entry) -> None:
        super().left(entry)
        del self.entries[entry]


class _Sizes(_Turns[_Size]):
    """Those of one tenant, the shortest first."""

    def _in_turn(self) -> Iterable[tuple[Hashable, _Size]]:
        return sorted(self.flows.items(), key=lambda item: item[1].size)


class _Line(_Flow):
    """The requests of one tenant at one priority."""

    __slots__ = ("sizes",)

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.sizes = _Sizes()

    def add(self, entry: Entry) -> None:
        super().add(entry)
        size = self.sizes.flows.get(entry.size)
        (size or self.sizes.enter(entry.size, _Size(entry.size))).add(entry)

    def holds(self, entry: Entry) -> bool:
        size = self.sizes.flows.get(entry.size)
        return size is not None and entry in size.entries

    def take(self, fits: Fits) -> tuple[Entry, float] | None:
        return self.sizes.take(fits)

    def remove(self, entry: Entry) -> None:
        self.left(entry)
        self.sizes.flows[entry.size].left(entry)

    def ahead_tokens(self, size: int) -> float:
        """What goes before a newcomer of that size: of its equals all, of others as much each."""
        sizes = {flow.size: flow.tokens for flow in self.sizes.waiting()}
        own = sizes.get(size, 0)
        return sum(min(tokens, own) for tokens in sizes.values())


class _Band(_Turns[_Line]):
    """The lines of one priority."""

    def __init__(self) -> None:
        super().__init__()
        self.of_size: Counter[int] = Counter()

    def add(self, entry: Entry) -> None:
        line = self.flows.get(entry.tenant)
        if line is None:
            line = self.enter(entry.tenant, _Line(entry.weight))
        line.weight = entry.weight
        line.add(entry)
        self.of_size[entry.size] += 1

    def pop(self, fits: Fits) -> Entry | None:
        if not any(fits(size) for size in self.of_size):
            return None
        taken = self.take(fits)
        if taken is None:
            return None
        self._gone(taken[0])
        return taken[0]

    def remove(self, entry: Entry) -> bool:
        """Whether it was there."""
        line = self.flows.get(entry.tenant)
        if line is None or not line.holds(entry):
            return False
        line.remove(entry)
        self._gone(entry)
        return True

    def _gone(self, entry: Entry) -> None:
        self.of_size[entry.size] -= 1
        if not self.of_size[entry.size]:
            del self.of_size[entry.size]


class FairQueue:
    """Everybody who waits for one pool. Its owner bounds it."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}

    def __bool__(self) -> bool:
        return bool(self._bands)

    def add(self, entry: Entry) -> None:
        """Behind the others of its tenant and size."""
        self._bands.setdefault(entry.priority, _Band()).add(entry)

    def pop(self, fits: Fits = anything) -> Entry | None:
        """Whose turn it is; None where nobody waits, or none fits whose turn it is. Who has the
        highest priority is not passed."""
        if not self._bands:
            return None
        priority = max(self._bands)
        entry = self._bands[priority].pop(fits)
        self._drop_empty(priority)
        return entry

    def charge(self, tenant: str, tokens: float) -> None:
        """So much was computed for it elsewhere. Who does not wait here owes nothing."""
        for band in self._bands.values():
            line = band.flows.get(tenant)
            if line is not None:
                line.charge(tokens)

    def remove(self, entry: Entry) -> bool:
        """It waits no more; whether it did."""
        band = self._bands.get(entry.priority)
        removed = band is not None and band.remove(entry)
        self._drop_empty(entry.priority)
        return removed

    def weights(self, priority: int) -> Iterator[float]:
        """Of the tenants that wait at that priority or above."""
        for own, band in self._bands.items():
            if own >= priority:
                yield from (line.weight for line in band.waiting())

    def ahead_tokens(self, entry: Entry) -> float:
        """What of its tenant would go before it if it came now."""
        ahead = 0.0
        for priority, band in self._bands.items():
            line = band.flows.get(entry.tenant)
            if line is not None and priority >= entry.priority:
                above = priority > entry.priority
                ahead += line.tokens if above else line.ahead_tokens(entry.size)
        return ahead

    def _drop_empty(self, priority: int) -> None:
        band = self._bands.get(priority)
        if band is not None and not band.of_size:
            del self._bands[priority]
