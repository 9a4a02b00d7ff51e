"""One listener for several: the metrics, and whoever else wants to know how attempts ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from events.decision import RouteDecision
from router.choice.route import Outcome
from router.telemetry.metrics import Metrics

OnEnd = Callable[[RouteDecision, Outcome], None]


class Listeners:
    """A RouteListener."""

    def __init__(self, metrics: Metrics, on_end: Sequence[OnEnd]) -> None:
        self.decided = metrics.decided
        self.continued = metrics.continued
        self._on_end = (metrics.ended, *on_end)

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        """An attempt ended."""
        for told in self._on_end:
            told(decision, outcome)
