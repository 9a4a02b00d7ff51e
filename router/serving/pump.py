"""One streamed answer: its deltas to the client's socket, until [DONE] or an error.

Three ways, one order. While the socket takes what it is given, a delta is written where it arrives,
in the middle of the link's reading, and no task wakes up for it: by a chute where it is nothing but
text, else by `_push`. Whatever the socket or the sink keeps back is pulled, and written with a
deadline; then the other ways are open again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from events.errors import UserError
from events.output import CoreDelta
from router.dispatch.chutes import Channel
from router.dispatch.sink import Direct
from router.errors import AttemptError
from router.openai.errors import SERVER_ERROR
from router.openai.stream import EventStream
from router.serving.answers import Answers, Numbered
from router.serving.http import Answer, log_unexpected
from router.serving.sse import KEEP_ALIVE, EventWriter, ReaderGoneError
from router.telemetry.metrics import Metrics


class Pump:
    """From `answers` through `reply` to `writer`; a comment whenever nothing was sent for
    `keepalive_s`."""

    def __init__(
        self,
        writer: EventWriter,
        answers: Answers,
        reply: EventStream,
        metrics: Metrics,
        keepalive_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._answers = answers
        self._reply = reply
        self._metrics = metrics
        self._gap = metrics.gaps.observe
        self._keepalive_s = keepalive_s
        self._direct = Direct(writer.free, self._push, self._channel)
        self._clock = clock
        self._sent_s = self._heard_s = clock()

    async def respond(self) -> Answer:
        """The whole answer. Raises UserError, or that a backend was chosen, while nothing was sent:
        then the answer can still be another one."""
        opened, first = self._writer.response.prepared, []
        if not opened:
            first = await self._answers.next(self._keepalive_s)
        self._answers.keep_ours()
        try:
            if not opened:
                await self._writer.open(self._answers.headers())
            await self._pump(first)
        except UserError as error:
            cause = error.__cause__
            self._metrics.stream_error(cause.kind if isinstance(cause, AttemptError) else "other")
            await self._writer.fail(self._reply.fail(error.error))
        except ReaderGoneError as error:
            self._metrics.stream_error(error.reason)
        except Exception as error:
            log_unexpected(error)
            self._metrics.stream_error("internal")
            await self._writer.fail(self._reply.fail(SERVER_ERROR))
        return self._writer.response

    async def _pump(self, batch: list[Numbered]) -> None:
        self._heard_s = self._clock()
        while True:
            events = [e for number, delta in batch for e in self._reply.feed(delta, number)]
            if events:
                await self._write(b"".join(events))
            if self._reply.done:
                break
            batch = await self._pull()
        await self._writer.close()

    async def _pull(self) -> list[Numbered]:
        """What came and was not pushed."""
        batch: list[Numbered] = []
        while not batch:
            quiet_s = self._sent_s + self._keepalive_s - self._clock()
            if quiet_s <= 0:
                await self._write(KEEP_ALIVE)
                quiet_s = self._keepalive_s
            batch = await self._answers.next(quiet_s, self._direct)
        self._note_gap()
        return batch

    def _channel(self) -> Channel | None:
        """For what can be written without being looked at."""
        around = self._reply.around_text()
        if around is None or not self._writer.free():
            return None
        self._writer.flush()
        writer = self._writer
        return Channel(*around, self._heard_s, writer.send, self._took, writer.socket, writer.idle)

    def _took(self, delta: CoreDelta, now_s: float) -> None:
        """So much was written meanwhile, and the gaps between were noted."""
        self._reply.progress.note(delta)
        self._heard_s = now_s
        if delta.text:
            self._sent_s = now_s

    def _push(self, delta: CoreDelta, now_s: float) -> None:
        """Write one delta here and now."""
        events = self._reply.feed(delta)
        self._gap(now_s - self._heard_s)
        self._heard_s = now_s
        if events:
            self._writer.put(events[0] if len(events) == 1 else b"".join(events))
            self._sent_s = now_s

    async def _write(self, data: bytes) -> None:
        await self._writer.write(data)
        self._sent_s = self._clock()

    def _note_gap(self) -> None:
        now_s = self._clock()
        self._gap(now_s - self._heard_s)
        self._heard_s = now_s
