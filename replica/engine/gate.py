"""The last door before the sink: every child that is opened leaves through it exactly once.

Whatever happens behind it (an engine that dies, hangs, or is closed in the middle of a step), a
child gets one output with `finish` set, and nothing after that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import RLock

from events.errors import CoreError, InvariantError
from events.output import FINISH_ERROR
from replica.engine.messages import ChildOutput, StepOutput, StepSink
from replica.sched.plan import ChildId, PlanId
from replica.sched.refusals import engine_gone

_log = logging.getLogger("replica.engine")


class OutputGate:
    """Thread-safe. The lock is held while the sink runs, so outputs of a child stay in order."""

    def __init__(self, sink: StepSink) -> None:
        self._sink = sink
        self._lock = RLock()
        self._open: dict[ChildId, bool] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, child: ChildId) -> None:
        """From now on the child is owed a finish. Raises InvariantError for one that is open."""
        with self._lock:
            if child in self._open:
                raise InvariantError(f"child {child} was submitted twice")
            self._open[child] = False

    def send(self, plan_id: PlanId, outputs: Iterable[ChildOutput]) -> None:
        """Hand over what belongs to open children; close those that finish."""
        with self._lock:
            passed = tuple(output for output in outputs if self._passes(output))
            if passed:
                self._deliver(StepOutput(plan_id=plan_id, children=passed))

    def refuse(self, plan_id: PlanId, child: ChildId, error: CoreError) -> None:
        """End one child with an error, if it is still open."""
        self.send(plan_id, [_ended(child, error)])

    def shut(self, plan_id: PlanId) -> None:
        """End every open child: the engine is gone."""
        with self._lock:
            ends = [_ended(child, engine_gone(started)) for child, started in self._open.items()]
            self.send(plan_id, ends)

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._sink(output)
        except Exception as error:
            # A sink must not raise. If it does, its own children suffer, not the engine.
            _log.critical("the sink of plan %d raised %s", output.plan_id, type(error).__name__)

    def _passes(self, output: ChildOutput) -> bool:
        if output.child not in self._open:
            return False
        if output.finish is None:
            self._open[output.child] = True
        else:
            del self._open[output.child]
        return True


def _ended(child: ChildId, error: CoreError) -> ChildOutput:
    return ChildOutput(
        child=child,
        token_ids=(),
        logprobs=(),
        cached_tokens=0,
        finish=FINISH_ERROR,
        error=error,
    )
