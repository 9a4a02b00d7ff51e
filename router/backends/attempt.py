"""One attempt on a server of another kind: like router.dispatch's, but its bytes pass elsewhere.

It can't be continued on another replica once a byte was delivered: what was generated is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from events.decision import RouteDecision
from router.backends.tail import ToldUsage
from router.choice.route import Chooser, Outcome
from router.errors import AttemptError

if TYPE_CHECKING:
    from router.dispatch.dispatch import RouteListener


class ForeignChosenError(Exception):
    """Not a failure: the choice fell on a backend, whose answer is no stream of deltas."""


class ForeignAttempt:
    """A decision that was reserved. `finish` is the only release; its first call counts.

    `most_tokens`: the longest that the answer may get."""

    answered = False
    continuable = False

    def __init__(
        self, decision: RouteDecision, chooser: Chooser, listener: RouteListener, most_tokens: int
    ) -> None:
        self.decision = decision
        self.most_tokens = most_tokens
        self.finished = False
        self.status = ""
        self.ttft_ms: float | None = None
        self._chooser = chooser
        self._listener = listener
        self._started_s = time.monotonic()
        self._heard_s = self._started_s
        self._held_up_s: float | None = None
        self._held_up_ms = 0.0
        self.given_up = False
        self._wait: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quiet: set[ForeignAttempt] = set()

    @property
    def elapsed_ms(self) -> float:
        """Since the choice."""
        return 1000 * (time.monotonic() - self._started_s)

    @property
    def served_ms(self) -> float:
        """Since the choice, that left out in which the client took no more: what the backend took,
        as far as can be told."""
        return self.elapsed_ms - self._held_up_ms

    @property
    def silent_s(self) -> float:
        """Seconds since the backend was last heard on this attempt, those left out in which nobody
        listened."""
        return (self._held_up_s or time.monotonic()) - self._heard_s

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """While the client takes no more nobody listens to the backend."""
        self._held_up_s = time.monotonic()
        try:
            yield
        finally:
            held_up_s = time.monotonic() - self._held_up_s
            self._heard_s += held_up_s
            self._held_up_ms += 1e3 * held_up_s
            self._held_up_s = None

    def wait_until(self, loop_s: float) -> asyncio.Timeout:
        """For what comes from the backend: a timeout, which `give_up` ends early."""
        self._wait = asyncio.timeout_at(loop_s if not self.given_up else 0.0)
        return self._wait

    def give_up(self) -> None:
        """Its backend hangs: whoever waits for it waits no more."""
        self.given_up = True
        if self._wait is not None and self._wait.when() is not None and not self._wait.expired():
            with contextlib.suppress(RuntimeError):
                # Nobody is within it any more.
                self._wait.reschedule(0.0)

    def send(self) -> None:
        """Raises ForeignChosenError: whoever asked for deltas has to relay instead."""
        raise ForeignChosenError

    def heard(self, streaming: bool) -> None:
        """Bytes of an answer came. The first ones of a stream are its first token; a plain answer
        comes at its end, and does not tell when that was."""
        self._heard_s = time.monotonic()
        if streaming and self.ttft_ms is None:
            self.ttft_ms = self.elapsed_ms
            self._tell_first_token(None, self.ttft_ms)

    def expect_silence(self, quiet: set[ForeignAttempt]) -> None:
        """A plain answer was asked for: its prefill is over when we would expect it to be, as soon
        as the backend gives a sign of life. In `quiet` it waits for one."""
        self._quiet = quiet
        self._timer = asyncio.get_running_loop().call_later(
            self.decision.predicted_ttft_ms / 1000, self._overdue
        )

    def _overdue(self) -> None:
        self._quiet.add(self)
        self._chooser.prefill_overdue(self.decision.decision_id)

    def backend_lives(self) -> None:
        """It was heard, on whatever attempt, after this one's prefill should have been over."""
        self._chooser.assume_prefilled(self.decision.decision_id)

    def complete(self, usage: ToldUsage | None) -> None:
        """The answer is whole."""
        self.answered = True
        if self.ttft_ms is None:
            cached_tokens = usage.cached_tokens if usage is not None else None
            self._tell_first_token(cached_tokens, self.decision.predicted_ttft_ms)
        self.finish("ok", usage=usage)

    def _tell_first_token(self, cached_tokens: int | None, ttft_ms: float) -> None:
        decision = self.decision
        self._chooser.first_token(
            decision.decision_id, cached_tokens, decision.prompt_tokens, ttft_ms
        )

    def fail(self, failure: AttemptError) -> None:
        """Report an end that is not an answer."""
        self.finish(failure.kind, failure.replica_fault)

    def finish(
        self, status: str, replica_fault: bool = False, usage: ToldUsage | None = None
    ) -> None:
        """Release everything and report; only the first call counts."""
        if self.finished:
            return
        self.finished = True
        self.status = status
        if self._timer is not None:
            self._timer.cancel()
        self._quiet.discard(self)
        cached_tokens = usage.cached_tokens if usage is not None else None
        told = Outcome(
            status=status,
            replica_fault=replica_fault,
            cached_tokens=cached_tokens or 0,
            prompt_tokens=usage.prompt_tokens if usage is not None else 0,
            completion_tokens=usage.completion_tokens if usage is not None else 0,
            ttft_ms=self.ttft_ms,
            e2e_ms=self.elapsed_ms,
            cached_told=cached_tokens is not None,
        )
        outcome = self._chooser.finish(self.decision.decision_id, told)
        self._listener.ended(self.decision, outcome)
