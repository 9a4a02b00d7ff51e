"""The router's alarms on the bus: each change at once, and what is on again every few seconds.
With each round goes what else is told regularly.

The bus may lose a message and a viewer may come late; the repetition makes up for both. Time-born
alarms are looked for with every round, so that they come without any traffic too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from events.alarm import AlarmNotice
from router.fleet.fleet import Fleet
from router.serving.http import log_unexpected
from router.telemetry.alarms import Alarm, Clock

PERIOD_S = 2.0


class Beacon:
    """Hands notices to `tell`, which must not wait."""

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[AlarmNotice], None],
        clock: Clock = time.monotonic,
        period_s: float = PERIOD_S,
        also: Callable[[], None] | None = None,
    ) -> None:
        self._fleet = fleet
        self._tell = tell
        self._also = also
        self._clock = clock
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None
        fleet.alarms.on_change(self._changed)

    async def start(self) -> None:
        """Begin the rounds."""
        self._task = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """End the rounds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        while True:
            try:
                self._round()
            except Exception as error:
                log_unexpected(error)
            await asyncio.sleep(self._period_s)

    def _round(self) -> None:
        self._fleet.check()
        for alarm in self._fleet.alarms:
            self._changed(alarm, True)
        if self._also is not None:
            self._also()

    def _changed(self, alarm: Alarm, active: bool) -> None:
        self._tell(
            AlarmNotice(
                name=alarm.name,
                replica=alarm.replica,
                active=active,
                age_ms=1e3 * (self._clock() - alarm.since_s),
                count=alarm.count,
                detail=alarm.detail,
                wall_time_ms=int(1e3 * time.time()),
            )
        )
