"""Undelivered deltas of one attempt, bounded in bytes. Merges, never drops, never blocks.

Up to the high water deltas are kept as they came; above it they are merged, child by child; above
the hard water the owner must stop the engine from making more (`full`) until it is `low` again.
"""

from __future__ import annotations

from collections import deque

from events.output import CoreDelta, CoreFinish, TokenLogprob, Usage

_DELTA_BYTES = 96
_ID_BYTES = 5
_LOGPROB_BYTES = 16
_ALTERNATIVE_BYTES = 15


def payload_bytes(delta: CoreDelta) -> int:
    """What a delta takes on the wire, without its own frame; never too small by much."""
    logprobs = (*delta.logprobs, *delta.prompt_logprobs)
    alternatives = sum(len(logprob.top) for logprob in logprobs)
    return (
        len(delta.text.encode())
        + _ID_BYTES * len(delta.token_ids)
        + _LOGPROB_BYTES * len(logprobs)
        + _ALTERNATIVE_BYTES * alternatives
    )


class _Pending:
    """One or more deltas of one child, joined when taken."""

    __slots__ = ("bytes", "finish", "head", "ids", "logprobs", "since_s", "texts", "usage")

    def __init__(self, delta: CoreDelta, since_s: float) -> None:
        self.head = delta
        self.since_s = since_s
        self.bytes = _DELTA_BYTES
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage: Usage = delta.usage
        self.finish: CoreFinish | None = None

    def extend(self, delta: CoreDelta, size_bytes: int) -> None:
        self.bytes += size_bytes
        self.texts.append(delta.text)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.usage = delta.usage
        self.finish = delta.finish

    def joined(self) -> CoreDelta:
        head = self.head
        return CoreDelta(
            head.request_id,
            head.attempt,
            head.child,
            "".join(self.texts),
            tuple(self.ids),
            tuple(self.logprobs),
            self.usage,
            self.finish,
            head.prompt_logprobs,
        )


class Mailbox:
    """`hard_bytes` may be passed by what the engine makes before it heeds the hold."""

    def __init__(self, high_bytes: int, hard_bytes: int) -> None:
        self.bytes = 0
        self._high_bytes = high_bytes
        self._hard_bytes = hard_bytes
        self._queue: deque[_Pending] = deque()
        self._last: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Above the hard water."""
        return self.bytes > self._hard_bytes

    @property
    def low(self) -> bool:
        """At or below the high water."""
        return self.bytes <= self._high_bytes

    @property
    def oldest_s(self) -> float | None:
        """When the oldest delta came; None when there is none."""
        return self._queue[0].since_s if self._queue else None

    def put(self, delta: CoreDelta, now_s: float = 0.0) -> bool:
        """Keep a delta; nothing may follow a child's finish. True when it was merged."""
        size_bytes = payload_bytes(delta)
        pending = self._last.get(delta.child)
        fresh = pending is None or self.low
        if pending is None or fresh:
            pending = self._last[delta.child] = _Pending(delta, now_s)
            self._queue.append(pending)
            self.bytes += _DELTA_BYTES
        pending.extend(delta, size_bytes)
        self.bytes += size_bytes
        return not fresh

    def take(self, max_bytes: int) -> list[CoreDelta]:
        """The oldest deltas up to `max_bytes`, but at least one if there is any."""
        taken: list[CoreDelta] = []
        room = max_bytes
        while self._queue and (not taken or self._queue[0].bytes <= room):
            pending = self._queue.popleft()
            if self._last.get(pending.head.child) is pending:
                del self._last[pending.head.child]
            room -= pending.bytes
            self.bytes -= pending.bytes
            taken.append(pending.joined())
        return taken
