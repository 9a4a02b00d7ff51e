"""The attempts of one link: each delta finds the sink of its attempt; all end together when the
link is lost. Knows neither sockets nor sessions."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from events.output import CoreDelta, ReplicaFrame, StepFrame
from events.wire import decode_delta, decode_replica_frame
from router.dispatch.chutes import Chutes
from router.dispatch.sink import AttemptSink
from router.errors import AttemptError

TURN_DELTAS = 64
"""Deltas between two turns of the event loop: about a millisecond of work."""
PASSED_FOR_ONE = 2
"""So many cost as much as one that has not passed by a chute."""


class AttemptTable:
    """A sink is in the table before its request is sent; `late_deltas`: those that nobody waited
    for."""

    def __init__(self, chutes: Chutes | None = None) -> None:
        self.late_deltas = 0
        self.chutes = chutes
        self._sinks: dict[tuple[str, int], AttemptSink] = {}
        self._turn_deltas = 0

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: AttemptSink) -> None:
        """From now on it gets what comes for its attempt."""
        self._sinks[sink.key] = sink

    def forget(self, sink: AttemptSink) -> None:
        """What comes for it later is dropped and counted."""
        self._sinks.pop(sink.key, None)

    def slowest_reader(self) -> tuple[int, float]:
        """(bytes that wait for one client, seconds since its replica was told to hold): the most
        of all."""
        return max((sink.waits() for sink in self._sinks.values()), default=(0, 0.0))

    def fail(self, error: AttemptError) -> None:
        """Every attempt ends here, once."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)

    async def take(self, data: bytes) -> ReplicaFrame | None:
        """Deltas of a frame that has come go to their sinks, in order; a frame of another kind is
        returned. Each delta costs a write to a client's socket: the loop gets its turn after every
        few, of one frame or of several. Whoever ends the reading meanwhile, the frame is taken in
        whole. Raises WireError."""
        if self.chutes is None or not self.chutes.any_open:
            frame = decode_replica_frame(data)
            if not isinstance(frame, StepFrame):
                return frame
            self._turn_deltas += len(frame.deltas)
            if self._turn_deltas < TURN_DELTAS:
                self._put(frame.deltas)
                return None
            parts = iter((frame,))
        else:
            parts = self._parts(data)
        try:
            for part in parts:
                if not isinstance(part, StepFrame):
                    return part
                await self._spread(part.deltas)
        finally:
            for part in parts:
                if isinstance(part, StepFrame):
                    self._put(part.deltas)
        return None

    def settle(self) -> None:
        """To be called every 0.1 s or so: streams learn what has passed, a tenth of them each."""
        if self.chutes is not None:
            self.chutes.settle()

    def _parts(self, data: bytes) -> Iterator[ReplicaFrame]:
        """The frame a part at a time, without the deltas that have passed by a chute."""
        start = taken = 0
        while self.chutes is not None and self.chutes.any_open:
            cast = self.chutes.cast(data, start, time.monotonic())
            if cast is None:
                break
            start, taken = cast.end, taken + cast.passed + len(cast.rest)
            self._turn_deltas += cast.passed // PASSED_FOR_ONE
            view = memoryview(data)
            yield StepFrame(deltas=tuple([decode_delta(view[at:end]) for at, end in cast.rest]))
            if start == len(data):
                return
        frame = decode_replica_frame(data)
        yield StepFrame(deltas=frame.deltas[taken:]) if isinstance(frame, StepFrame) else frame

    async def _spread(self, deltas: Sequence[CoreDelta]) -> None:
        rest = iter(deltas)
        try:
            while True:
                if self._turn_deltas >= TURN_DELTAS:
                    self._turn_deltas = 0
                    await asyncio.sleep(0)
                turn = tuple(itertools.islice(rest, TURN_DELTAS))
                if not turn:
                    break
                self._put(turn)
                self._turn_deltas += len(turn)
        finally:
            self._put(rest)

    def _put(self, deltas: Iterable[CoreDelta]) -> None:
        find, now_s = self._sinks.get, time.monotonic()
        for delta in deltas:
            sink = find((delta.request_id, delta.attempt))
            if sink is None or not sink.put(delta, now_s):
                self.late_deltas += 1
