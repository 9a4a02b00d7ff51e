"""Who should be there by the cluster file, and is not."""

from __future__ import annotations

from collections.abc import Iterable

from router.fleet.fleet import Fleet
from router.telemetry.alarms import Clock

AWAY = "replica_away"
AWAY_AFTER_S = 30.0
"""One that starts again is back by then, as a rule."""


class Awaited:
    """Of the names in the cluster file: an alarm lasts for as long as one is away."""

    def __init__(self, names: Iterable[str], fleet: Fleet, clock: Clock) -> None:
        self._seen_at_s = dict.fromkeys(names, clock())
        self._fleet = fleet
        self._clock = clock

    def check(self) -> None:
        """Look for them; every few seconds."""
        now_s = self._clock()
        for name, seen_at_s in self._seen_at_s.items():
            there = self._fleet.member(name) is not None
            if there:
                self._seen_at_s[name] = now_s
            away = not there and now_s - seen_at_s >= AWAY_AFTER_S
            detail = "named in the cluster file, and nothing is heard of it"
            self._fleet.alarms.set(away, AWAY, name, detail)
