"""Which of a revision's pools a request goes to.

Replicas of one revision differ in block size, dtype or rope while one of these is rolled over: they
share no block key then, and each pool has its own chain of a prompt. Each of them serves all the
same, so a request goes where it would be cheapest now, warm blocks counted in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from router.choice.route import RouteQuery
from router.policies.base import Candidates

Survey = Callable[[RouteQuery], Candidates]


def cheapest(survey: Survey, queries: Sequence[RouteQuery]) -> tuple[int, RouteQuery]:
    """Which of them, each of another pool, and itself with what was found in the others; the first
    one where none can be placed."""
    costs_ms, shown = [], []
    for query in queries:
        found = survey(query)
        costs_ms.append(found.best.cost_ms)
        shown.append(found.shown())
    at = costs_ms.index(min(costs_ms))
    asked = [(query.pool, found) for query, found in zip(queries, shown, strict=True)]
    return at, replace(queries[at], beside=(*asked[:at], *asked[at + 1 :]))
