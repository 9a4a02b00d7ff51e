"""Chutes: deltas that are nothing but text go from the replica's frame to the client's socket in
one native step, without an object or a call for each of them.

A chute is open while its reader waits and its socket takes more. What passed is told to the stream
now and then, as one delta, and at the latest when the chute closes; whatever is more than text
closes it. While the transport holds nothing back, the step writes to the socket itself; what that
does not take at once is the transport's to send, in the same order. Where no compiler is, every
delta takes the way through its sink (router/dispatch/sink).
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from configs.native import CompileError, NativeSource, address, declare, load_object
from events.output import CoreDelta, Usage
from router.telemetry.histogram import Histogram

log = logging.getLogger(__name__)

KERNELS = NativeSource("chutes", Path(__file__).parent, ("chutes.cpp",), ("msgpack.h",))

SETTLE_TURNS = 10

CAST_DELTAS = 128
"""In one step: about as long as the event loop may be held up."""

Span = tuple[int, int]
"""Where something starts and ends in a frame."""


class Cast(NamedTuple):
    """How many deltas passed, where the others stand, and where the next one does."""

    passed: int
    rest: list[Span]
    end: int


class Channel(Struct, frozen=True):
    """What one stream asks of a chute: `before` and `behind` go around each text, which is written
    as a JSON string; `send` gets HTTP chunks of it and says whether more may come. `heard_s`: when
    its last delta came. `took` is told what has passed, and when the last of it came. `socket` (a
    file, or -1) may be written to past `send` once `idle()` says that nothing is on its way there.
    """

    before: bytes
    behind: bytes
    heard_s: float
    send: Callable[[bytes], bool]
    took: Callable[[CoreDelta, float], object]
    socket: int
    idle: Callable[[], bool]


class Owner(Protocol):
    """Who opened a chute."""

    @property
    def key(self) -> tuple[str, int]:
        """(id of the request, attempt)."""

    def broke(self, error: Exception) -> None:
        """The channel has raised it."""


class _Result(ctypes.Structure):
    """What the kernel has found, as chutes.cpp lays it out."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("out_bytes", ctypes.c_int64),
        ("pieces", ctypes.c_void_p),
        ("piece_numbers", ctypes.c_int64),
        ("rest", ctypes.c_void_p),
        ("rest_numbers", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("text", ctypes.c_void_p),
        ("text_bytes", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("id_count", ctypes.c_int64),
        ("usage", ctypes.c_int64 * 3),
        ("heard_s", ctypes.c_double),
    )


@cache
def chute_kernels() -> ctypes.CDLL | None:
    """Compiled at the first call on a machine; None without a compiler."""
    pointer, long = ctypes.c_void_p, ctypes.c_long
    text = [ctypes.c_char_p, long]
    try:
        library = load_object(KERNELS, quick=True)
    except CompileError as error:
        log.warning("no native chutes, each delta is passed on by itself: %s", error)
        return None
    declare(
        library,
        {
            "wr_chutes_free": [pointer],
            "wr_chutes_shut": [pointer, long],
            "wr_chutes_direct": [pointer, long],
            "wr_chutes_close": [pointer, long],
        },
    )
    declare(
        library,
        {
            "wr_chutes_new": [pointer, long, pointer, pointer],
            "wr_chutes_result": [pointer],
        },
        pointer,
    )
    declare(
        library,
        {
            "wr_chutes_open": [
                pointer, *text, ctypes.c_uint64, *text, *text, ctypes.c_double, ctypes.c_int,
            ],
            "wr_chutes_drain": [pointer, long],
            "wr_chutes_cast": [pointer, *text, long, long, ctypes.c_double],
        },
        long,
    )  # fmt: skip
    return library


class Chute:
    """One that is open. Close it once."""

    __slots__ = ("_chutes", "channel", "owner", "slot")

    def __init__(self, chutes: Chutes, slot: int, owner: Owner, channel: Channel) -> None:
        self.slot = slot
        self.owner = owner
        self.channel = channel
        self._chutes = chutes

    def shut(self) -> None:
        """Nothing passes from now on: what waits for the reader must not be overtaken."""
        self._chutes.shut(self)

    def close(self) -> None:
        """The end of it; tells what has passed."""
        self._chutes.close(self)


class Chutes:
    """Those of one link: a replica speaks for nobody else's attempts. Event loop only."""

    def __init__(self, kernels: ctypes.CDLL, gaps: Histogram) -> None:
        """`gaps` is told the time between two deltas of a stream, now and then."""
        self._kernels = kernels
        self._gaps = gaps
        self._bounds = np.array(gaps.bounds, np.float64)
        self._counts = np.zeros(len(self._bounds) + 1, np.uint64)
        self._total_s = np.zeros(1, np.float64)
        self._native = kernels.wr_chutes_new(
            address(self._bounds), len(self._bounds), address(self._counts), address(self._total_s)
        )
        self._result = _Result.from_address(kernels.wr_chutes_result(self._native))
        self._open: dict[int, Chute] = {}
        self._behind: set[int] = set()
        self._turn = 0
        weakref.finalize(self, kernels.wr_chutes_free, self._native)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def any_open(self) -> bool:
        """Whether there is one that something may pass by."""
        return bool(self._open)

    def open(self, owner: Owner, channel: Channel) -> Chute | None:
        """For child 0 of the owner's attempt; None where another attempt of it has one here."""
        request_id, attempt = owner.key
        name, before, behind = request_id.encode(), channel.before, channel.behind
        slot = self._kernels.wr_chutes_open(
            self._native, name, len(name), attempt,
            before, len(before), behind, len(behind), channel.heard_s, channel.socket,
        )  # fmt: skip
        if slot < 0:
            return None
        chute = self._open[slot] = Chute(self, slot, owner, channel)
        if channel.socket >= 0:
            self._behind.add(slot)
        return chute

    def cast(self, frame: bytes, start: int, now_s: float, most: int = CAST_DELTAS) -> Cast | None:
        """Let pass what may of the next `most` deltas of a frame: from `start`, which is 0 or where
        the cast before ended. None where the frame is not plainly a step's from there on: then
        nothing of it has passed."""
        if self._behind:
            self._catch_up()
        passed = self._kernels.wr_chutes_cast(self._native, frame, len(frame), start, most, now_s)
        if passed < 0:
            return None
        result = self._result
        pieces = iter(_numbers(result.pieces, result.piece_numbers))
        for slot, start, end in zip(pieces, pieces, pieces, strict=True):
            self._send(slot, ctypes.string_at(result.out + start, end - start))
        rest = iter(_numbers(result.rest, result.rest_numbers))
        return Cast(passed, list(zip(rest, rest, strict=True)), result.end)

    def settle(self) -> None:
        """Tell some what has passed, so that after `SETTLE_TURNS` calls all are told: what is told
        rarely costs little, and what is told in turns holds nobody up."""
        self._turn = (self._turn + 1) % SETTLE_TURNS
        for chute in list(self._open.values()):
            if chute.slot % SETTLE_TURNS != self._turn:
                continue
            try:
                self._tell(chute)
            except Exception as error:  # the stream's own: the others go on
                self._break(chute, error)
        self._tell_gaps()

    def shut(self, chute: Chute) -> None:
        """As Chute.shut."""
        self._kernels.wr_chutes_shut(self._native, chute.slot)
        self._behind.discard(chute.slot)

    def close(self, chute: Chute) -> None:
        """As Chute.close."""
        del self._open[chute.slot]
        self._behind.discard(chute.slot)
        try:
            self._tell(chute)
        finally:
            self._kernels.wr_chutes_close(self._native, chute.slot)
            self._tell_gaps()

    def _catch_up(self) -> None:
        """Those whose transport has sent everything are written to directly."""
        for slot in [slot for slot in self._behind if self._open[slot].channel.idle()]:
            self._behind.remove(slot)
            self._kernels.wr_chutes_direct(self._native, slot)

    def _send(self, slot: int, data: bytes) -> None:
        chute = self._open[slot]
        try:
            if not chute.channel.send(data):
                self.shut(chute)
            elif chute.channel.socket >= 0:
                self._behind.add(slot)
        except Exception as error:  # the reader's own: the link goes on
            self._break(chute, error)

    def _break(self, chute: Chute, error: Exception) -> None:
        self.shut(chute)
        chute.owner.broke(error)

    def _tell(self, chute: Chute) -> None:
        if not self._kernels.wr_chutes_drain(self._native, chute.slot):
            return
        result = self._result
        text = ctypes.string_at(result.text, result.text_bytes).decode()
        ids = np.frombuffer(ctypes.string_at(result.ids, 4 * result.id_count), np.uint32)
        request_id, attempt = chute.owner.key
        usage = Usage(*result.usage)
        delta = CoreDelta(request_id, attempt, 0, text, tuple(ids.tolist()), (), usage)
        chute.channel.took(delta, result.heard_s)

    def _tell_gaps(self) -> None:
        if self._total_s[0]:
            self._gaps.take(self._counts.tolist(), float(self._total_s[0]))
            self._counts.fill(0)
            self._total_s.fill(0.0)


def _numbers(place: int, count: int) -> array[int]:
    found = array("q")
    if count:
        found.frombytes(ctypes.string_at(place, 8 * count))
    return found


if __name__ == "__main__":
    chute_kernels()
