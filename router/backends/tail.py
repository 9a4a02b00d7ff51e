"""What the gateway has to know of an answer that it does not parse: its last bytes say it.

Where the gateway asked for the usage event and the client did not, that event is taken out again.
It is found by one search in each read, not line by line: of a read whole events are passed on, a
begun one waits for its end, so the event that is looked for is never split. It is a small one, so
a begun event beyond `MAX_HELD_BYTES` is passed on as it comes.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass

MAX_HELD_BYTES = 16 * 1024
KEPT_BYTES = 32 * 1024

_ENDS = (b"\n\n", b"\r\n\r\n")
_END = re.compile(b"\n\n|\r\n\r\n")
_DONE = re.compile(rb"data:\s*\[DONE\]$")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"\s*:', re.MULTILINE)
"""Quotes inside of a JSON string are escaped: none of these matches what a model wrote."""

_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToldUsage:
    """Token counts as the server told them; None where it did not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Tail:
    """One answer going by. `events`: it is a stream of server-sent events."""

    def __init__(self, events: bool, drop_usage: bool = False) -> None:
        self._events = events
        self._drop_usage = drop_usage
        self._held = b""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        """What of it may be passed on now."""
        self._keep(data)
        if self._drop_usage:
            data = self._whole_events(data)
        if data:
            self._last = data[-4:]
        return data

    def rest(self) -> bytes:
        """What is still held when the answer ends."""
        rest, self._held = self._held, b""
        return rest

    @property
    def between_events(self) -> bool:
        """Whether an event of our own may follow what was passed on."""
        return self._events and (not self._last or self._last.endswith(_ENDS))

    @property
    def complete(self) -> bool:
        """Whether the answer came to its proper end: [DONE] of a stream, the last brace of JSON."""
        end = b"".join(self._kept)[-256:].rstrip()
        return _DONE.search(end) is not None if self._events else end.endswith(b"}")

    @property
    def failed(self) -> bool:
        """Whether the server told of an error inside of its stream."""
        return self._events and _ERROR.search(b"".join(self._kept)) is not None

    def usage(self) -> ToldUsage | None:
        """The last usage that was told."""
        kept = b"".join(self._kept)
        start = max((match.end() for match in _USAGE.finditer(kept)), default=-1)
        if start < 0:
            return None
        try:
            found, _ = _json.raw_decode(kept[start:].decode(errors="replace"))
            return _told(found)
        except (ValueError, RecursionError):
            return None

    def _keep(self, data: bytes) -> None:
        data = data[-KEPT_BYTES:]
        self._kept.append(data)
        self._kept_bytes += len(data)
        while self._kept_bytes - len(self._kept[0]) >= KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def _whole_events(self, data: bytes) -> bytes:
        data = self._held + data
        end = _last_end(data)
        if len(data) - end > MAX_HELD_BYTES:
            end = len(data)
        self._held = data[end:]
        return _without_usage_event(data[:end])


def _last_end(data: bytes) -> int:
    """Where the last whole event of `data` ends; 0 where none does."""
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)


def _without_usage_event(data: bytes) -> bytes:
    for found in _NO_CHOICES.finditer(data):
        start = _last_end(data[: found.start()])
        end = _next_end(data, found.end())
        if _USAGE.search(data, start, end):
            return data[:start] + data[end:]
    return data


def _next_end(data: bytes, place: int) -> int:
    end = _END.search(data, place)
    return end.end() if end else len(data)


def _told(found: object) -> ToldUsage | None:
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return ToldUsage(
        _count(found.get("prompt_tokens")) or 0,
        _count(found.get("completion_tokens")) or 0,
        _count(cached),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**31 else None
