"""What was refused and came again, by the stage that had refused it.

A client that repeats a request says that it does, not where the first one was refused: its
tenant's oldest refusal that has not come back yet is taken to be that one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

MAX_TENANTS = 1_024
"""The one that was refused longest ago goes first."""
MAX_OWED = 256
"""Refusals of one tenant that may still come back."""

ELSEWHERE = "elsewhere"
"""Of what was refused before its tenant was known, or by another router."""


class Comebacks:
    """`by_stage` counts what came again."""

    def __init__(self) -> None:
        self.by_stage: Counter[str] = Counter()
        self._owed: OrderedDict[str, deque[str]] = OrderedDict()

    def refused(self, tenant: str, stage: str) -> None:
        """A request of the tenant's was refused at that stage."""
        owed = self._owed.get(tenant)
        if owed is None:
            owed = self._owed[tenant] = deque(maxlen=MAX_OWED)
            if len(self._owed) > MAX_TENANTS:
                self._owed.popitem(last=False)
        self._owed.move_to_end(tenant)
        owed.append(stage)

    def came(self, tenant: str) -> None:
        """The tenant repeats a request."""
        owed = self._owed.get(tenant)
        stage = owed.popleft() if owed else ELSEWHERE
        if not owed:
            self._owed.pop(tenant, None)
        self.by_stage[stage] += 1
