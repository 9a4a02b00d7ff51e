"""Server-sent events, and what every reply says of itself.

A stream ends with [DONE] only when every choice ended cleanly. A stream that fails ends with one
error event and nothing else: it never looks like a clean end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import msgspec
from msgspec import Struct

from events.errors import CoreError
from router.openai.errors import error_body
from router.openai.progress import Progress
from router.randomness import random_bytes

DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode
"""Anything to JSON bytes; the encoder is shared because it is the hot path."""


class ReplyHead(Struct, frozen=True):
    """`created` is Unix time in seconds; `fingerprint` names weights and settings of the model."""

    id: str
    created: int
    model: str
    fingerprint: str


def new_head(prefix: str, model: str, fingerprint: str) -> ReplyHead:
    """A head with a fresh id ("chatcmpl-..." or "cmpl-..."), whatever ids the client sent."""
    return ReplyHead(f"{prefix}-{random_bytes(14).hex()}", int(time.time()), model, fingerprint)


def error_event(error: CoreError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(ABC):
    """What the streams of both routes share: how they end. `progress` is for whoever feeds them."""

    def __init__(self, progress: Progress, include_usage: bool) -> None:
        self.progress = progress
        self._include_usage = include_usage

    @property
    def done(self) -> bool:
        """[DONE] was given out."""
        return self.progress.done and self.progress.error is None

    @abstractmethod
    def around_text(self) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text, a JSON string, in an event of the only choice;
        None where there are several, or where events may hold more than text from now on."""

    def fail(self, error: CoreError) -> list[bytes]:
        """End the stream with an error event, once, unless it has ended."""
        if self.progress.done or self.progress.error is not None:
            return []
        self.progress.error = error
        return [error_event(error)]

    def _ending(self) -> list[bytes]:
        """What follows the chunk that ended a choice."""
        if self.progress.error is not None:
            return [error_event(self.progress.error)]
        if not self.progress.done:
            return []
        return [self._usage_event(), DONE] if self._include_usage else [DONE]

    @abstractmethod
    def _usage_event(self) -> bytes:
        """The last chunk: no choices, only usage."""
