"""Telling the bus what was decided, how it ended, what is alarming, and what is lacking.

Never waits, never holds up a request. Decisions and outcomes leave once a tick, in one message: all
outcomes, but only the newest decisions, since nobody could read more of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from events.alarm import AlarmNotice
from events.bus import Bus
from events.decision import RouteDecision, RouteOutcome
from events.scale import ScaleSignal
from events.subjects import router_subject
from events.wire import encode

TICK_S = 0.05
DECISIONS_A_TICK = 8
MAX_OUTCOMES_A_MESSAGE = 1_024
MAX_WAITING = 4_096

Message = AlarmNotice | ScaleSignal | tuple[RouteDecision, ...] | tuple[RouteOutcome, ...]


class Announcer:
    """Bounded queues in front of the bus; what does not fit is dropped and counted."""

    def __init__(self, bus: Bus, cluster: str, router_id: str) -> None:
        self.dropped = 0
        self._bus = bus
        self._decision_subject = router_subject(cluster, router_id, "decisions")
        self._outcome_subject = router_subject(cluster, router_id, "outcomes")
        self._alarm_subject = router_subject(cluster, router_id, "alarm")
        self._scale_subject = router_subject(cluster, router_id, "scale")
        self._decisions: deque[RouteDecision] = deque(maxlen=DECISIONS_A_TICK)
        self._outcomes: list[RouteOutcome] = []
        self._notices: list[tuple[str, Message]] = []
        self._work = asyncio.Event()
        self._idle = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._publish_forever())

    async def close(self) -> None:
        """Stop; what waits is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def decided(self, decision: RouteDecision) -> None:
        """A choice was made."""
        self._decisions.append(decision)
        if self._idle:
            self._wake()

    def ended(self, outcome: RouteOutcome) -> None:
        """An attempt ended."""
        if len(self._outcomes) < MAX_WAITING:
            self._outcomes.append(outcome)
        else:
            self.dropped += 1
        if self._idle:
            self._wake()

    def alarm(self, notice: AlarmNotice) -> None:
        """An alarm is on, or over."""
        self._note(self._alarm_subject, notice)

    def scale(self, signal: ScaleSignal) -> None:
        """How far the fleet is from being large enough."""
        self._note(self._scale_subject, signal)

    def _note(self, subject: str, message: Message) -> None:
        if len(self._notices) < MAX_WAITING:
            self._notices.append((subject, message))
        else:
            self.dropped += 1
        if self._idle:
            self._wake()

    def _wake(self) -> None:
        self._idle = False
        self._work.set()

    async def _publish_forever(self) -> None:
        while True:
            if not (self._notices or self._decisions or self._outcomes):
                self._idle = True
                await self._work.wait()
                self._work.clear()
            for subject, message in self._taken():
                await self._bus.publish(subject, encode(message))
            await asyncio.sleep(TICK_S)

    def _taken(self) -> list[tuple[str, Message]]:
        """All that waits, as messages."""
        found = list(self._notices)
        if self._decisions:
            found.append((self._decision_subject, tuple(self._decisions)))
        for start in range(0, len(self._outcomes), MAX_OUTCOMES_A_MESSAGE):
            some = tuple(self._outcomes[start : start + MAX_OUTCOMES_A_MESSAGE])
            found.append((self._outcome_subject, some))
        for waiting in (self._notices, self._decisions, self._outcomes):
            waiting.clear()
        return found
