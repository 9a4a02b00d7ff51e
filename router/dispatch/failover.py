"""One request across its attempts: where one replica breaks off, another one goes on.

Before the first delta the next replica starts anew. Behind it the next one continues from what was
delivered, so that the reader sees one stream: nothing twice, nothing missing. Where that can't be
done the request ends with an error, never with a clean end. Either way it needs an attempt left,
time left, and credit in the budget that all requests share, so that a broken fleet is not hit with
several times its traffic. What a lost replica had in flight moves elsewhere once without credit:
however much it was, it comes from there no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

from msgspec.structs import replace

from events.errors import InvariantError, UserError
from events.output import CoreDelta
from router.backends.attempt import ForeignAttempt
from router.choice.route import HandOff
from router.dispatch.chutes import Channel
from router.dispatch.delivered import Delivered
from router.dispatch.dispatch import Attempt, Dispatcher
from router.dispatch.job import Job, Leg
from router.dispatch.sink import Direct, Give, merge
from router.errors import AttemptError, timeout_failure

STALL_S = 10.0
"""A deadline that passes while the replica was silent for this long is held against it."""


class RetryBudget:
    """Each request brings `ratio` of a retry, up to `most`; a retry takes one. `retried` counts all
    retries by their cause, those that cost nothing too."""

    def __init__(self, ratio: float = 0.2, most: float = 20.0) -> None:
        self._ratio = ratio
        self._most = most
        self._credit = most
        self.retried: Counter[str] = Counter()

    def deposit(self) -> None:
        """A request came."""
        self._credit = min(self._most, self._credit + self._ratio)

    def withdraw(self) -> bool:
        """Whether one more retry is allowed; takes it."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Run:
    """A request being answered. Use as a context manager: leaving it releases everything, and
    tells the replica to stop unless the answer is complete.

    `whole`: the answer is delivered at its end, in one piece. Until then it can be begun anew
    where nobody can continue. `grow` is told how many tokens have come. `may_relay`: the choice may
    fall on a backend of another kind; `next` then raises ForeignChosenError."""

    def __init__(
        self,
        job: Job,
        dispatcher: Dispatcher,
        budget: RetryBudget,
        retries: int,
        whole: bool = False,
        grow: Callable[[int], None] | None = None,
        may_relay: bool = False,
    ) -> None:
        self.job = job
        self.delivered = False
        self.may_relay = may_relay
        self._begun = False
        self._whole = whole
        self._grow = grow
        self._kept: list[CoreDelta] = []
        self._record = Delivered(job.sampling.n)
        self._dispatcher = dispatcher
        self._budget = budget
        self._retries = 0 if job.pin else retries
        self._attempts = 0
        self._failed: frozenset[str] = frozenset()
        self._rerouted: frozenset[str] = frozenset()
        self._cause: AttemptError | None = None
        self._attempt: Attempt | ForeignAttempt | None = None
        self._handing: asyncio.Task[HandOff] | None = None
        self._hand_off: HandOff | None = None
        self._clock = asyncio.get_running_loop().time
        self._waits_since_s = self._clock()
        self._end_s = self._waits_since_s + job.timeout_s
        """Loop time by which everything has to be over."""
        budget.deposit()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handing is not None:
            self._handing.cancel()
        if self._attempt is not None:
            self._attempt.finish("client_gone")

    @property
    def attempt(self) -> Attempt | ForeignAttempt | None:
        """The newest attempt; its decision names the replica that answers."""
        return self._attempt

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._attempt is not None and self._attempt.answered

    async def next(self, idle_s: float, direct: Direct | None = None) -> tuple[CoreDelta, ...]:
        """The next deltas that did not go to `direct`, or () when there was none within `idle_s`.
        Raises UserError."""
        if self.done:
            raise InvariantError("nothing comes after a complete answer")
        wake_s = self._clock() + idle_s
        while True:
            splits = not self._attempts and self._dispatcher.may_split(self.job)
            if splits and not await self._handed_off(wake_s):
                return ()
            try:
                attempt = self._sent_attempt()
                deadline_s = self.deadline_s()
                noting = None if direct is None else self._noting(attempt, direct)
                batch = await attempt.take(noting, min(wake_s, deadline_s))
            except AttemptError as failure:
                self.give_up_or_retry(failure)
            except TimeoutError:
                # Which limit it was, not what the clock says: a timer may fire a moment early.
                if wake_s < deadline_s:
                    return ()
                self.time_out()
            else:
                self._begun = True
                if deltas := self._deliver(batch):
                    return deltas

    async def _handed_off(self, until_s: float) -> bool:
        """Whether the request can be placed: its prompt was computed elsewhere, or need not be.
        False when that is still going on at `until_s`."""
        if self._handing is None:
            begun = self._dispatcher.hand_off(self.job, self._leg())
            if not isinstance(begun, asyncio.Task):
                self._hand_off = begun
                return True
            self._handing = begun
        left_s = until_s - self._clock()
        done, _ = await asyncio.wait((self._handing,), timeout=max(0.0, left_s))
        if done:
            self._hand_off = self._handing.result()
        return bool(done)

    def heard(self) -> None:
        """A backend has begun to answer."""
        self._begun = True

    def grow(self, tokens: int) -> None:
        """That many tokens have passed as bytes."""
        if self._grow is not None:
            self._grow(tokens)

    def _noting(self, attempt: Attempt, direct: Direct) -> Direct:
        """What goes there was heard on the attempt, and is delivered: as `_note` says, in one step
        a delta."""
        grow, note, usage = self._grow, self._record.note, attempt.usage

        def noting(give: Give) -> Give:
            def pass_on(delta: CoreDelta, now_s: float) -> None:
                attempt.heard_s = now_s
                usage[delta.child] = delta.usage
                if grow is not None:
                    grow(len(delta.token_ids))
                give(note(delta), now_s)

            return pass_on

        def channel() -> Channel | None:
            inner = direct.channel()
            return None if inner is None else replace(inner, took=noting(inner.took))

        return Direct(direct.free, noting(direct.give), channel)

    def _note(self, delta: CoreDelta) -> CoreDelta:
        """The delta as the reader gets it: the one place where all that is delivered passes."""
        if self._grow is not None:
            self._grow(len(delta.token_ids))
        return self._record.note(delta)

    def _deliver(self, batch: tuple[CoreDelta, ...]) -> tuple[CoreDelta, ...]:
        """What the reader gets of this batch."""
        batch = tuple(map(self._note, batch))
        if self._whole:
            self._kept += batch
            if not self.done:
                return ()
            batch = merge(self._kept) if len(self._kept) > 1 else batch
        self.delivered = True
        return batch

    def _sent_attempt(self) -> Attempt:
        if self._attempt is None or self._attempt.finished:
            self._attempts += 1
            self._attempt = self._place()
            self._attempt.send()
        return self._attempt

    def _place(self) -> Attempt | ForeignAttempt:
        try:
            return self._dispatcher.decide(self.job, self._leg())
        except UserError:
            if self._kept:
                self._start_over()
                return self._place()
            # Nobody else is there: the first cause says more than "no replica".
            if self._cause is None:
                raise
            if self._rerouted:
                # The others have gone meanwhile: better a long queue than none.
                self._failed, self._rerouted = self._failed - self._rerouted, frozenset()
                return self._place()
            raise UserError(self._cause.error) from self._cause

    def _leg(self) -> Leg:
        now_s = self._clock()
        return Leg(
            attempt=self._attempts,
            failed=self._excluded(),
            progress=self._record.progress() if self._attempts > 1 else (),
            first_token_s=self.deadline_s() - now_s,
            left_s=self._end_s - now_s,
            hand_off=self._hand_off,
        )

    def _excluded(self) -> frozenset[str]:
        return self._failed if self.may_relay else self._failed | self._dispatcher.backends

    def deadline_s(self) -> float:
        """Loop time by which the next thing has to happen. A backend's plain answer comes whole,
        at its end."""
        if self._begun or (self._whole and isinstance(self._attempt, ForeignAttempt)):
            return self._end_s
        first_s = self._waits_since_s + self.job.first_token_timeout_s
        return first_s if first_s < self._end_s else self._end_s

    def give_up_or_retry(self, failure: AttemptError) -> None:
        """The attempt ended so; returns when there may be another. Raises UserError."""
        attempt = self._attempt
        assert attempt is not None
        attempt.fail(failure)
        if not self._may_retry(failure):
            raise UserError(failure.error) from failure
        self._budget.retried[failure.cause] += 1
        self._failed |= {attempt.decision.replica}
        if failure.rerouted:
            self._rerouted |= {attempt.decision.replica}
        self._cause = failure
        if self._begun:
            self._begun, self._waits_since_s = False, self._clock()
        if self._kept and not attempt.continuable:
            self._start_over()

    def _start_over(self) -> None:
        """Forget what was kept: nobody has seen it, and nobody can go on behind it."""
        self._kept, self._record = [], Delivered(self.job.sampling.n)

    def _may_retry(self, failure: AttemptError) -> bool:
        assert self._attempt is not None
        if failure.rerouted and self._attempts == 1:
            return True
        return (
            failure.retryable
            and (not self.delivered or self._attempt.continuable)
            and self._attempts <= self._retries
            and self._clock() < self.deadline_s()
            and (self._moves(failure) or self._budget.withdraw())
        )

    def _moves(self, failure: AttemptError) -> bool:
        """Whether this is the first attempt, and lost with all that was there."""
        return failure.deserted and self._attempts == 1

    def time_out(self) -> NoReturn:
        """The deadline has passed. Raises UserError."""
        attempt = self._attempt
        assert attempt is not None
        silent = not self._begun or attempt.silent_s > STALL_S
        attempt.finish("timeout", replica_fault=silent)
        late = "the first token" if self.deadline_s() < self._end_s else "the request"
        raise UserError(timeout_failure(f"{late} took longer than allowed").error)
