"""Named alarms of the router: what it noticed, for which replica, since when, how often.

Raising and clearing are idempotent, so that a check may run as often as it likes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""

MAX_ACTIVE = 1_024

OnChange = Callable[["Alarm", bool], None]
"""An alarm, and whether it is on now."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """`since_s`: clock time of the first of `count` sightings. `detail` holds no secrets."""

    name: str
    replica: str
    since_s: float
    count: int
    detail: str


class Alarms:
    """Active alarms by (name, replica); how often each name was seen, and how often turned on."""

    def __init__(self, clock: Clock) -> None:
        self.raised_total: Counter[str] = Counter()
        self.turned_on_total: Counter[str] = Counter()
        self._clock = clock
        self._active: dict[tuple[str, str], Alarm] = {}
        self._listeners: list[OnChange] = []

    def __iter__(self) -> Iterator[Alarm]:
        return iter(sorted(self._active.values(), key=lambda alarm: (alarm.name, alarm.replica)))

    def __len__(self) -> int:
        return len(self._active)

    def on_change(self, listener: OnChange) -> None:
        """`listener` is told whenever an alarm is turned on or off; it must not raise."""
        self._listeners.append(listener)

    def active_by_name(self) -> dict[str, int]:
        """How many are on, for each name that was ever seen."""
        on = Counter(name for name, _ in self._active)
        return {name: on[name] for name in self.raised_total}

    def active(self, name: str, replica: str) -> bool:
        """Whether this alarm is on."""
        return (name, replica) in self._active

    def raise_(self, name: str, replica: str, detail: str = "") -> None:
        """Turn an alarm on, or count it once more; the first sighting is logged."""
        self.raised_total[name] += 1
        known = self._active.get((name, replica))
        if known is not None:
            self._active[name, replica] = replace(known, count=known.count + 1, detail=detail)
        elif len(self._active) < MAX_ACTIVE:
            alarm = self._active[name, replica] = Alarm(name, replica, self._clock(), 1, detail)
            self.turned_on_total[name] += 1
            self._tell(alarm, True)
            log.warning("alarm %s for replica %s: %s", name, replica, detail)

    def clear(self, name: str, replica: str) -> None:
        """Turn an alarm off."""
        alarm = self._active.pop((name, replica), None)
        if alarm is not None:
            self._tell(alarm, False)
            log.info("alarm %s for replica %s is over", name, replica)

    def set(self, on: bool, name: str, replica: str, detail: str) -> None:
        """Turn an alarm on or off, as something is or isn't so."""
        if on:
            self.raise_(name, replica, detail)
        else:
            self.clear(name, replica)

    def forget(self, replica: str) -> None:
        """Turn off whatever is on for a replica that left or began a new life."""
        for key in [key for key in self._active if key[1] == replica]:
            self.clear(*key)

    def _tell(self, alarm: Alarm, active: bool) -> None:
        for listener in self._listeners:
            listener(alarm, active)
