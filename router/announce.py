"""Telling the bus what was decided, how it ended, and what is alarming.

Never waits, never holds up a request.
"""

from __future__ import annotations

import asyncio
from collections import deque

from events.alarm import AlarmNotice
from events.bus import Bus
from events.decision import RouteDecision, RouteOutcome
from events.subjects import router_subject
from events.wire import encode

MAX_WAITING = 4_096

Message = RouteDecision | RouteOutcome | AlarmNotice


class Announcer:
    """A bounded queue in front of the bus; what does not fit is dropped and counted."""

    def __init__(self, bus: Bus, cluster: str, router_id: str) -> None:
        self.dropped = 0
        self._bus = bus
        self._decision_subject = router_subject(cluster, router_id, "decision")
        self._outcome_subject = router_subject(cluster, router_id, "outcome")
        self._alarm_subject = router_subject(cluster, router_id, "alarm")
        self._waiting: deque[tuple[str, Message]] = deque()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._publish())

    async def close(self) -> None:
        """Stop; what waits is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def decided(self, decision: RouteDecision) -> None:
        """A choice was made."""
        self._put(self._decision_subject, decision)

    def ended(self, outcome: RouteOutcome) -> None:
        """An attempt ended."""
        self._put(self._outcome_subject, outcome)

    def alarm(self, notice: AlarmNotice) -> None:
        """An alarm is on, or over."""
        self._put(self._alarm_subject, notice)

    def _put(self, subject: str, message: Message) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((subject, message))
        self._work.set()

    async def _publish(self) -> None:
        while True:
            while self._waiting:
                subject, message = self._waiting.popleft()
                await self._bus.publish(subject, encode(message))
            self._work.clear()
            await self._work.wait()
