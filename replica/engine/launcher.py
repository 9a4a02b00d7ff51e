"""Who executes plans: the engine's own thread, or one beside it while the next plan is made."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from replica.sched.plan import ExecutionPlan, ExecutionResult, Runner


class Launcher:
    """Plans are executed one after the other, in the order in which they were launched."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, plan: ExecutionPlan) -> Future[ExecutionResult]:
        """Execute now; what the runner raises is in the future."""
        return _execute(self._runner, plan, Future())

    def close(self) -> None:
        """Nothing is launched any more, and nothing executes when this returns."""


class ThreadLauncher(Launcher):
    """Executes on a thread of its own. A runner that hangs leaves that behind, a daemon."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._plans: SimpleQueue[tuple[ExecutionPlan, Future[ExecutionResult]] | None] = (
            SimpleQueue()
        )
        self._thread: Thread | None = None

    def launch(self, plan: ExecutionPlan) -> Future[ExecutionResult]:
        """Execute behind what was launched before."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="engine-device", daemon=True)
            self._thread.start()
        future: Future[ExecutionResult] = Future()
        self._plans.put((plan, future))
        return future

    def close(self) -> None:
        """Wait for what was launched, then end the thread."""
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (launched := self._plans.get()) is not None:
            _execute(self._runner, *launched)


def _execute(
    runner: Runner, plan: ExecutionPlan, future: Future[ExecutionResult]
) -> Future[ExecutionResult]:
    try:
        future.set_result(runner.execute(plan))
    except Exception as error:
        future.set_exception(error)
    return future
