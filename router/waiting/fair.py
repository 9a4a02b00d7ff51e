"""Whose turn it is: deficit round robin over tenants, first come first served within each.

Higher priorities go first; within one, every tenant gets prefill work in proportion to its weight,
however many requests it has waiting. A request is priced when it goes, for by then what it shares
with those before it may be warm: so a line goes while it is in credit and owes what it took beyond
it (surplus round robin). Who has asked for nothing lately owes nothing, and goes at once. Pure
data, no clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

QUANTUM_TOKENS = 512.0
"""What a tenant of weight 1 is given each round."""
LEAST_COST_TOKENS = 1.0


class Entry:
    """One request that waits. `tokens` is what it counts for in bounds, `price` tells what it
    would cost now, in tokens of prefill."""

    __slots__ = ("price", "priority", "tenant", "tokens", "weight")

    def __init__(
        self, tenant: str, weight: float, priority: int, tokens: int, price: Callable[[], float]
    ) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority = priority
        self.tokens = tokens
        self.price = price


MAX_OWED_TOKENS = 64 * QUANTUM_TOKENS
"""For work elsewhere, at weight 1: what is beyond it is forgiven, so that nobody waits for long for
what he had at a router that is gone."""


class _Line:
    """The requests of one tenant at one priority. An empty one is kept while it owes."""

    __slots__ = ("credit_tokens", "entries", "weight")

    def __init__(self, weight: float) -> None:
        self.entries: OrderedDict[Entry, None] = OrderedDict()
        self.weight = weight
        self.credit_tokens = 0.0
        self.give(1)

    def give(self, rounds: int) -> None:
        self.credit_tokens += rounds * QUANTUM_TOKENS * self.weight

    def charge(self, tokens: float) -> None:
        """For work elsewhere."""
        least = min(self.credit_tokens, -MAX_OWED_TOKENS * self.weight)
        self.credit_tokens = max(least, self.credit_tokens - tokens)

    def rounds_owed(self) -> int:
        """Until it is in credit."""
        return math.floor(-self.credit_tokens / (QUANTUM_TOKENS * self.weight)) + 1

    def pop(self) -> Entry:
        entry, _ = self.entries.popitem(last=False)
        self.credit_tokens -= max(LEAST_COST_TOKENS, entry.price())
        return entry


class _Band:
    """The lines of one priority, in turn; newcomers first."""

    def __init__(self) -> None:
        self.lines: OrderedDict[str, _Line] = OrderedDict()
        self.waiting = 0

    def add(self, entry: Entry) -> None:
        line = self.lines.get(entry.tenant)
        if line is None:
            line = self.lines[entry.tenant] = _Line(entry.weight)
            self.lines.move_to_end(entry.tenant, last=False)
        line.weight = entry.weight
        line.entries[entry] = None
        self.waiting += 1

    def remove(self, entry: Entry) -> bool:
        """Whether it was there."""
        line = self.lines.get(entry.tenant)
        if line is None or entry not in line.entries:
            return False
        del line.entries[entry]
        self.waiting -= 1
        return True

    def pop(self) -> Entry:
        while True:
            for _ in range(len(self.lines)):
                tenant, line = next(iter(self.lines.items()))
                if line.credit_tokens <= 0:
                    line.give(1)
                    self.lines.move_to_end(tenant)
                elif line.entries:
                    self.waiting -= 1
                    return line.pop()
                else:
                    del self.lines[tenant]
            self._skip_rounds()

    def _skip_rounds(self) -> None:
        """All rounds but the last in which nobody could go."""
        rounds = min(line.rounds_owed() for line in self.lines.values() if line.entries) - 1
        for line in self.lines.values():
            line.give(max(0, rounds))


class FairQueue:
    """Everybody who waits for one pool. Its owner bounds it."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}

    def __bool__(self) -> bool:
        return bool(self._bands)

    def add(self, entry: Entry) -> None:
        """Behind the others of its tenant."""
        self._bands.setdefault(entry.priority, _Band()).add(entry)

    def pop(self) -> Entry:
        """Whose turn it is. Raises KeyError when nobody waits."""
        if not self._bands:
            raise KeyError("nobody waits")
        priority = max(self._bands)
        entry = self._bands[priority].pop()
        self._drop_empty(priority)
        return entry

    def charge(self, tenant: str, tokens: float) -> None:
        """So much was computed for it elsewhere. Who does not wait here owes nothing."""
        for band in self._bands.values():
            line = band.lines.get(tenant)
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
                yield from (line.weight for line in band.lines.values() if line.entries)

    def _drop_empty(self, priority: int) -> None:
        band = self._bands.get(priority)
        if band is not None and not band.waiting:
            del self._bands[priority]
