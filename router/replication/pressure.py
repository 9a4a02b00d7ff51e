"""How often requests are forced off the replica that is warm for them: too few replicas show so."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from events.decision import RouteDecision
from events.scale import ScaleSignal
from router.dispatch.job import Job
from router.fleet.fleet import Fleet
from router.telemetry.alarms import Clock
from router.telemetry.metrics import Sample
from router.telemetry.rate import Rate

HALF_LIFE_S = 15.0
MAX_NAMES = 1_024
OTHERS = "other"


class Pressure:
    """Told of every choice; those that were no choices, because of a pin, don't count."""

    def __init__(self, fleet: Fleet, clock: Clock = time.monotonic) -> None:
        self._fleet = fleet
        self._forced_off: Counter[str] = Counter()
        self._decisions = Rate(clock, HALF_LIFE_S)
        self._forced = Rate(clock, HALF_LIFE_S)

    def note(self, job: Job, decision: RouteDecision) -> None:
        """One more."""
        if job.pin is not None:
            return
        self._decisions.add()
        if decision.forced_off:
            self._forced.add()
            known = decision.forced_off in self._forced_off or len(self._forced_off) < MAX_NAMES
            self._forced_off[decision.forced_off if known else OTHERS] += 1

    def totals(self) -> Iterable[Sample]:
        """For the metrics: how many each warm replica had to let go."""
        return [((replica,), count) for replica, count in self._forced_off.items()]

    def signal(self) -> ScaleSignal:
        """As it stands now."""
        loads = [of.load for of in self._fleet.replicas() if of.linked and of.load is not None]
        taking = [load for load in loads if not load.draining]
        return ScaleSignal(
            replicas=len(taking),
            decisions_per_s=self._decisions.per_s(),
            forced_off_per_s=self._forced.per_s(),
            waiting=sum(load.waiting for load in taking),
            queued_prefill_tokens=sum(load.queued_prefill_tokens for load in taking),
            wall_time_ms=int(1e3 * time.time()),
        )
