"""A stream of server-sent events on its way: whole events go on as they came, each one that is
not JSON ends it.

No event is passed on before it is whole and was read, so a client never gets one that nobody can
read and a clean end behind it. Where the gateway asked for the usage event and the client did not,
that one is taken out again.
"""

from __future__ import annotations

import json
import re

import msgspec

from router.backends.tail import ToldUsage, told_usage

MAX_EVENT_BYTES = 8 * 1024 * 1024
"""Held until it is whole; a longer one is as good as broken."""

_ENDS = (b"\n\n", b"\r\n\r\n")
_END = re.compile(b"\n\n|\r\n\r\n")
_MORE_DATA = re.compile(rb"^data:(.*)", re.MULTILINE)
_EMPTY = re.compile(rb"\[\s*\]")
_DONE = b"[DONE]"
_ABSENT = msgspec.Raw()


class _Said(msgspec.Struct, gc=False):
    """What of an event the gateway has to know; its values stay bytes."""

    choices: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Said).decode


class BrokenEventError(Exception):
    """It can't be read, or has no end. The events before it are good."""


class Events:
    """One answer going by. `complete`: its last event was [DONE]. `failed`: the server told of an
    error in it. `broken`: an event came that nobody can read; nothing behind it is passed on."""

    keeps_alive = True
    """Whole events alone are passed on: one of our own may always follow."""

    def __init__(self, drop_usage: bool = False) -> None:
        self.complete = False
        self.failed = False
        self.broken = False
        self._drop_usage = drop_usage
        self._usage = b""
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._edge = b""

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now: all events that have ended, up to a broken one."""
        if self.broken:
            return b""
        if self._begun:
            return self._go_on(data)
        return self._begin(data) if _ENDS[0] in data or _ENDS[1] in data else self._hold(data)

    def _go_on(self, data: bytes) -> bytes:
        """Behind an event that has begun; its end may lie across two reads."""
        edge = self._edge + data
        if _ENDS[0] in edge or _ENDS[1] in edge:
            begun, self._begun = self._begun, []
            return self._begin(b"".join((*begun, data)))
        return self._hold(data)

    def _hold(self, data: bytes) -> bytes:
        if not self._begun:
            self._begun_bytes, self._edge = 0, b""
        self._begun.append(data)
        self._begun_bytes += len(data)
        self._edge = (self._edge + data)[-3:]
        self.broken = self._begun_bytes > MAX_EVENT_BYTES
        return b""

    def _begin(self, data: bytes) -> bytes:
        """From the start of an event, with at least one end."""
        ends = [found.end() for found in _END.finditer(data)]
        if ends[-1] < len(data):
            self._hold(data[ends[-1] :])
        return self._passed(data, ends)

    def rest(self) -> bytes:
        """What is still held when the answer ends: an event without the empty line behind it."""
        rest, self._begun = b"".join(self._begun), []
        return self._passed(rest, [len(rest)]) if rest.strip() and not self.broken else b""

    def usage(self) -> ToldUsage | None:
        """The last usage that was told."""
        try:
            return told_usage(json.loads(self._usage)) if self._usage else None
        except RecursionError:
            return None

    def _passed(self, whole: bytes, ends: list[int]) -> bytes:
        kept: list[bytes] = []
        start = 0
        for end in ends:
            event = whole[start:end]
            start = end
            try:
                if not self._taken_out(event):
                    kept.append(event)
            except BrokenEventError:
                self.broken = True
                break
        return b"".join(kept)

    def _taken_out(self, event: bytes) -> bool:
        """Whether it is the one that only the gateway asked for. Raises BrokenEventError."""
        data = _data_of(event)
        if data is None:
            return False
        self.complete = len(data) < 16 and data.strip() == _DONE
        if self.complete:
            return False
        said = _read(data)
        self.failed |= _given(said.error)
        if not _given(said.usage):
            return False
        self._usage = bytes(said.usage)
        return self._drop_usage and _EMPTY.fullmatch(said.choices) is not None


def _data_of(event: bytes) -> bytes | None:
    """Of all its data lines; None where there is none (comments, names)."""
    if event.startswith(b"data:") and event.count(b"\n") == 2:
        return event[5:]
    lines = _MORE_DATA.findall(event)
    if len(lines) == 1:
        return lines[0]
    return b"\n".join(lines) if lines else None


def _read(data: bytes) -> _Said:
    """Raises BrokenEventError. Python's own parser has the last word: it reads halves of surrogate
    pairs, and numbers that are none, as the servers that write them do."""
    try:
        text = data.decode()
        try:
            return _decode(text)
        except msgspec.DecodeError:
            return _as_said(json.loads(text))
    except (ValueError, RecursionError):
        raise BrokenEventError from None


def _as_said(found: object) -> _Said:
    """Raises ValueError."""
    if not isinstance(found, dict):
        raise ValueError("an event is an object")
    names = found.keys() & _Said.__struct_fields__
    return _Said(**{name: msgspec.Raw(json.dumps(found[name]).encode()) for name in names})


def _given(value: msgspec.Raw) -> bool:
    """Whether it is there, and not null."""
    return value != _ABSENT and bytes(value) != b"null"
