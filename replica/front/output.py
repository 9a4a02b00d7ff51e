"""From the engine's thread to the event loop: steps in, deltas into their attempts' mailboxes.

`StepQueue` is the sink that exists before the engine does; `Dispatcher` turns steps into deltas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from events.errors import CoreError
from events.output import FINISH_ERROR, FINISH_STOP, CoreDelta
from replica.engine.messages import ChildOutput, Engine, StepOutput
from replica.front.attempts import Attempts
from replica.front.child import Child
from replica.front.metrics import FrontCounters

log = logging.getLogger(__name__)

INTERNAL = CoreError(
    status=500, type="server_error", code="internal_error", message="The replica failed."
)

StepHandler = Callable[[StepOutput, float], None]
"""(step, monotonic time of its arrival at the sink); runs on the event loop."""


class StepQueue:
    """The StepSink: at most one wake-up of the loop per step, fewer when the loop lags.

    What lies here is bounded by the live children times the tokens that they may still make.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: deque[tuple[StepOutput, float]] = deque()
        self._handler: StepHandler | None = None
        self._scheduled = False

    def attach(self, handler: StepHandler) -> None:
        """Name who gets the steps, also those that came before. On the event loop."""
        self._handler = handler
        self._drain()

    def __call__(self, output: StepOutput) -> None:
        """Any thread."""
        self._steps.append((output, time.monotonic()))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._steps.clear()  # the loop is closed: nobody waits for answers any more

    def _drain(self) -> None:
        # Cleared before the first look: a step that comes in between wakes the loop once more.
        self._scheduled = False
        while self._handler is not None and self._steps:
            self._handler(*self._steps.popleft())


class Dispatcher:
    """Steps to deltas. A child that can't be served ends with an error; its neighbours go on."""

    def __init__(self, engine: Engine, attempts: Attempts, counters: FrontCounters) -> None:
        self._engine = engine
        self._attempts = attempts
        self._counters = counters

    def __call__(self, step: StepOutput, now_s: float) -> None:
        for output in step.children:
            child = self._attempts.child(output.child)
            if child is None:
                self._counters.late_outputs += 1
            else:
                self._advance(child, output, now_s)

    def _advance(self, child: Child, output: ChildOutput, now_s: float) -> None:
        delta = self._delta(child, output, now_s)
        if delta is None:
            return
        if delta.finish is not None and output.finish is None:
            self._engine.abort(child.id, answered=delta.finish.reason == FINISH_STOP)
        self._attempts.deliver(child, delta)

    def _delta(self, child: Child, output: ChildOutput, now_s: float) -> CoreDelta | None:
        try:
            return child.advance(output, now_s)
        except Exception as error:
            # Only the kind is logged: a message could quote tokens.
            log.error("output of child %d can't be shown: %s", child.id, type(error).__name__)
            return child.close(FINISH_ERROR, INTERNAL, now_s)
