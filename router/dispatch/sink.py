"""The sink of one attempt: where its deltas wait for their reader. Bounded, closed exactly once.

A delta takes one of three ways. While the reader waits and nothing else does, it goes straight to
whom the reader named: no task wakes up for it; where it is nothing but text not even we see it, it
went down a chute. Else it is kept for the reader's next `take`: what ends a child always is, and so
is whatever the other ways did not want.

Credits go from the client's socket to the engine: while the reader lags, deltas of one child are
merged; above half the limit the replica is told to hold the request; a reader that stays behind,
or a replica that ignores the hold, ends the attempt. A neighbour is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct

from events.output import CoreDelta
from events.request import Abort, Hold, Resume
from router.dispatch.chutes import Channel, Chute, Chutes
from router.errors import AttemptError, slow_reader_failure

Control = Callable[[Abort | Hold | Resume], None]
"""Sends a frame to the replica; never blocks, never raises."""

Give = Callable[[CoreDelta, float], object]
"""Takes a delta and the time when it came (monotonic)."""

_DELTA_BYTES = 256
_OVERRUN = 2
_HOLD_GRACE_S = 1.0
_HARD_BYTES = 64 * 1024 * 1024


class Direct(Struct, frozen=True):
    """Where a delta can go at once: `give` takes it, but only while `free()`. `channel`: how it may
    do so by a chute; nobody gives meanwhile. What they raise, the reader gets."""

    free: Callable[[], bool]
    give: Give
    channel: Callable[[], Channel | None]


@dataclass(frozen=True, slots=True)
class SinkLimits:
    """`buffer_bytes` may wait for the reader; a held attempt ends after `slow_reader_s`."""

    buffer_bytes: int
    slow_reader_s: float


def weight_bytes(delta: CoreDelta) -> int:
    """About what a waiting delta costs."""
    weight = _DELTA_BYTES + 2 * len(delta.text) + 8 * len(delta.token_ids)
    if delta.logprobs:
        weight += 96 * sum(1 + len(entry.top) for entry in delta.logprobs)
    return weight


def merge(deltas: list[CoreDelta]) -> tuple[CoreDelta, ...]:
    """One delta per child: texts, ids and logprobs joined in order, newest usage and finish."""
    if len(deltas) == 1:
        return (deltas[0],)
    children: dict[int, list[CoreDelta]] = {}
    for delta in deltas:
        children.setdefault(delta.child, []).append(delta)
    return tuple(_join(parts) for parts in children.values())


def _join(parts: list[CoreDelta]) -> CoreDelta:
    last = parts[-1]
    if len(parts) == 1:
        return last
    return CoreDelta(
        last.request_id,
        last.attempt,
        last.child,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        tuple(entry for part in parts for entry in part.logprobs),
        last.usage,
        last.finish,
        parts[0].prompt_logprobs,
    )


def _give_time_up(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_exception(TimeoutError())


class AttemptSink:
    """Made before the request is sent. The link calls `put` and `fail`, dispatch `take`."""

    def __init__(
        self,
        key: tuple[str, int],
        children: Iterable[int],
        limits: SinkLimits,
        control: Control,
        chutes: Chutes | None = None,
    ) -> None:
        self.key = key
        self._open = set(children)
        self._chutes = chutes
        self._chute: Chute | None = None
        self._limits = limits
        self._control = control
        self._waiting: list[CoreDelta] = []
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._direct: Direct | None = None
        self._failure: AttemptError | None = None
        self._broken: Exception | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        self._held_since_s = 0.0

    @property
    def ended(self) -> bool:
        """Nothing more will come: every child has finished, or the attempt failed."""
        return not self._open or self._failure is not None

    @property
    def answered(self) -> bool:
        """Every child has finished, nothing failed, and the reader has taken all of it."""
        return not self._open and self._failure is None and not self._waiting

    @property
    def buffered_bytes(self) -> int:
        """What waits for the reader."""
        return self._bytes

    def waits(self) -> tuple[int, float]:
        """(bytes that wait for the reader, seconds since the replica was told to hold)."""
        if self._hold_timer is None:
            return self._bytes, 0.0
        return self._bytes, self._loop.time() - self._held_since_s

    @property
    def held(self) -> bool:
        """Whether the replica was told to hold."""
        return self._hold_timer is not None

    def put(self, delta: CoreDelta, now_s: float) -> bool:
        """Take a delta in that came at `now_s`; False when it belongs to no open child (late,
        doubled or foreign)."""
        if self._failure is not None or delta.child not in self._open:
            return False
        if delta.finish is not None:
            self._open.remove(delta.child)
        elif (direct := self._direct) is not None and not self._waiting and self._chute is None:
            try:
                if direct.free():
                    direct.give(delta, now_s)
                    return True
            except Exception as error:  # the reader's own: the link goes on
                self.broke(error)
                return True
        if self._chute is not None:
            # Opened since its frame was read, or the frame told it nothing.
            self._chute.shut()
        self._waiting.append(delta)
        self._bytes += weight_bytes(delta)
        self._wake()
        if self._bytes > self._limits.buffer_bytes // 2 or self._hold_timer is not None:
            self._watch()
        return True

    def broke(self, error: Exception) -> None:
        """What the reader named can't take deltas any more."""
        self._broken, self._direct = error, None
        self._wake()

    def fail(self, failure: AttemptError) -> None:
        """End the attempt; only the first failure counts, and none after a complete answer."""
        if self.ended:
            return
        self._failure = failure
        self._cancel_hold()
        self._wake()

    def release(self) -> None:
        """The reader leaves. Tells the replica, unless it has already ended the attempt."""
        if not self.ended:
            self._control(Abort(request_id=self.key[0], attempt=self.key[1]))
            self._open.clear()
        self._cancel_hold()
        self._waiting.clear()
        self._bytes = 0

    async def take(
        self, direct: Direct | None = None, until_s: float | None = None
    ) -> tuple[CoreDelta, ...]:
        """All that waits, merged per child; waits for at least one, and until then `direct` is
        offered what comes. Raises AttemptError, after what came before the failure was taken, what
        `direct` raised, and TimeoutError where nothing came until `until_s` (of the loop's time).
        """
        while self._broken is None and not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._reader = reader = self._loop.create_future()
            timer = None if until_s is None else self._loop.call_at(until_s, _give_time_up, reader)
            self._direct = direct
            try:
                if direct is not None and self._chutes is not None:
                    channel = direct.channel()
                    self._chute = None if channel is None else self._chutes.open(self, channel)
                await reader
            finally:
                self._direct = self._reader = None
                if timer is not None:
                    timer.cancel()
                if (chute := self._chute) is not None:
                    self._chute = None
                    chute.close()
        if self._broken is not None:
            raise self._broken
        batch, self._waiting, self._bytes = self._waiting, [], 0
        if self._hold_timer is not None and self._cancel_hold() and not self.ended:
            self._control(Resume(request_id=self.key[0], attempt=self.key[1]))
        return merge(batch)

    def _wake(self) -> None:
        """The reader, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _watch(self) -> None:
        if self._bytes > self._limits.buffer_bytes // 2 and self._open:
            self._hold()
        if self._hold_timer is not None and self._overrun():
            self._give_up()

    def _hold(self) -> None:
        if self._hold_timer is not None:
            return
        self._control(Hold(request_id=self.key[0], attempt=self.key[1]))
        self._held_since_s = self._loop.time()
        self._hold_timer = self._loop.call_later(self._limits.slow_reader_s, self._give_up)

    def _overrun(self) -> bool:
        """The replica goes on although it was told to hold. One large delta is no overrun."""
        if self._bytes <= _OVERRUN * self._limits.buffer_bytes:
            return False
        held_s = self._loop.time() - self._held_since_s
        return held_s > _HOLD_GRACE_S or self._bytes > _HARD_BYTES

    def _give_up(self) -> None:
        if self.ended:
            return
        self._control(Abort(request_id=self.key[0], attempt=self.key[1]))
        self._waiting.clear()
        self._bytes = 0
        self.fail(slow_reader_failure())

    def _cancel_hold(self) -> bool:
        held = self._hold_timer is not None
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        return held
