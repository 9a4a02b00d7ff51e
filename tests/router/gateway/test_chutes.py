"""What a chute takes out of a frame, against the typed decoder: of good frames and broken ones."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from events.errors import WireError
from events.output import CoreDelta, CoreFinish, StepFrame, TokenLogprob, Usage
from events.session import Ack
from events.wire import decode_delta, decode_replica_frame, encode
from router.dispatch.chutes import CAST_DELTAS, SETTLE_TURNS, Channel, Chutes
from router.openai.stream import to_json
from router.telemetry.histogram import Histogram

BOUNDS = (0.5, 1.0, 2.0)
BEFORE, BEHIND = b'data: {"text":', b"}\n\n"

texts = st.text(max_size=8)
counts = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1])
usages = st.builds(Usage, counts, counts, counts)
logprobs = st.lists(st.builds(TokenLogprob, counts, st.floats(-9, 0)), max_size=2).map(tuple)
finishes = st.none() | st.builds(CoreFinish, reason=st.sampled_from(["stop", "error"]))
deltas = st.builds(
    CoreDelta,
    st.sampled_from(["a", "b", "nobody", "x" * 40]),
    st.integers(1, 2),
    st.integers(0, 1),
    texts | st.just("y" * 300),
    st.lists(counts, max_size=3).map(tuple),
    st.just(()) | logprobs,
    usages,
    finishes,
    st.just(()) | logprobs,
)


class Stream:
    """Whose chute it is; what was sent to it, and told."""

    def __init__(self, key: tuple[str, int]) -> None:
        self.key = key
        self.sent = b""
        self.told: list[CoreDelta] = []

    def broke(self, error: Exception) -> None:
        raise AssertionError from error

    def send(self, data: bytes) -> bool:
        size, _, rest = data.partition(b"\r\n")
        assert rest.endswith(b"\r\n")
        assert len(rest) - 2 == int(size, 16)
        self.sent += rest[:-2]
        return True

    def took(self, delta: CoreDelta, heard_s: float) -> None:
        assert heard_s == 7.0
        self.told.append(delta)

    def channel(self) -> Channel:
        return Channel(BEFORE, BEHIND, 6.25, self.send, self.took, -1, lambda: False)


class Opened:
    """Chutes for attempt 1 of "a" and of "b"."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.gaps = Histogram("gaps", "gaps", BOUNDS)
        self.chutes = Chutes(kernels, self.gaps)
        self.streams = [Stream((name, 1)) for name in "ab"]
        for stream in self.streams:
            assert self.chutes.open(stream, stream.channel()) is not None

    def settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            self.chutes.settle()

    def rest(self, frame: bytes, most: int = CAST_DELTAS) -> list[CoreDelta] | None:
        rest: list[CoreDelta] = []
        start = 0
        while start < len(frame) or not frame:
            cast = self.chutes.cast(frame, start, 7.0, most)
            if cast is None:
                return None
            start = cast.end
            rest += [decode_delta(frame[at:end]) for at, end in cast.rest]
        self.settle()
        return rest


def _is_text(delta: CoreDelta) -> bool:
    more = delta.child or delta.logprobs or delta.finish or delta.prompt_logprobs
    return delta.attempt == 1 and delta.request_id in ("a", "b") and not more


def _expected(given: Sequence[CoreDelta]) -> tuple[dict[str, list[CoreDelta]], list[CoreDelta]]:
    """What passes, by request, and the others: all behind the first of its attempt that is more
    than text."""
    passed: dict[str, list[CoreDelta]] = {"a": [], "b": []}
    rest: list[CoreDelta] = []
    shut = set()
    for delta in given:
        if _is_text(delta) and delta.request_id not in shut:
            passed[delta.request_id].append(delta)
            continue
        rest.append(delta)
        if delta.attempt == 1:
            shut.add(delta.request_id)
    return passed, rest


@given(st.lists(deltas, max_size=6), st.sampled_from([1, 2, CAST_DELTAS]))
@settings(max_examples=200, deadline=None)
def test_what_is_only_text_passes_and_the_rest_is_as_it_was(
    kernels: ctypes.CDLL, given: list[CoreDelta], most: int
) -> None:
    opened = Opened(kernels)
    passed, rest = _expected(given)
    assert opened.rest(encode(StepFrame(deltas=tuple(given))), most) == rest
    for stream in opened.streams:
        mine = passed[stream.key[0]]
        events = [BEFORE + to_json(delta.text) + BEHIND for delta in mine if delta.text]
        assert stream.sent == b"".join(events)
        told = [(each.text, each.token_ids, each.usage) for each in stream.told]
        ids = tuple(token for delta in mine for token in delta.token_ids)
        text = "".join(delta.text for delta in mine)
        assert told == ([(text, ids, mine[-1].usage)] if mine else [])
    number = sum(map(len, passed.values()))
    assert opened.gaps.buckets()[-1] == ("+Inf", number)
    assert opened.gaps.buckets()[0] == ("0.5", number - sum(map(bool, passed.values())))
    assert opened.gaps.total == 0.75 * sum(map(bool, passed.values()))


@given(st.lists(deltas, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_broken_frame_is_never_taken_for_a_good_one(
    kernels: ctypes.CDLL, given: list[CoreDelta], data: st.DataObject
) -> None:
    frame = bytearray(encode(StepFrame(deltas=tuple(given))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        if data.draw(st.booleans()):
            frame[at] = data.draw(st.integers(0, 255))
        else:
            del frame[at:]
            break
    opened, broken = Opened(kernels), bytes(frame)
    try:
        whole = decode_replica_frame(broken)
    except WireError:
        whole = None
    try:
        rest = opened.rest(broken)
    except WireError:
        assert whole is None
        return
    if rest is None:
        assert not any(stream.sent or stream.told for stream in opened.streams)
        return
    assert isinstance(whole, StepFrame)
    passed, expected = _expected(whole.deltas)
    assert rest == expected
    assert [s.told != [] for s in opened.streams] == [
        bool(passed[s.key[0]]) for s in opened.streams
    ]


@given(st.text())
@example("".join(map(chr, range(0x180))))
@example("\ud7ff\ue000\uffff\U00010000\U0010ffff")
@settings(deadline=None)
def test_a_text_is_the_json_that_others_write(kernels: ctypes.CDLL, text: str) -> None:
    opened = Opened(kernels)
    delta = CoreDelta("a", 1, 0, text, (), (), Usage(1, 0, 1))
    assert opened.rest(encode(StepFrame(deltas=(delta,)))) == []
    assert opened.streams[0].sent == (BEFORE + to_json(text) + BEHIND if text else b"")


def test_texts_that_are_no_utf8_are_left_to_the_decoder(kernels: ctypes.CDLL) -> None:
    delta = CoreDelta("a", 1, 0, "####", (), (), Usage(1, 0, 1))
    frame = encode(StepFrame(deltas=(delta,)))
    for bad in (b"\xc0\x80##", b"\xed\xa0\x80#", b"\xf4\x90\x80\x80", b"###\xe2", b"\x80###"):
        opened = Opened(kernels)
        cast = opened.chutes.cast(frame.replace(b"####", bad), 0, 7.0)
        assert cast is not None
        assert len(cast.rest) == 1
        assert not opened.streams[0].sent


def test_other_frames_are_left_to_the_decoder(kernels: ctypes.CDLL) -> None:
    opened = Opened(kernels)
    for frame in (encode(Ack(received=3)), b"", b"\xdf\xff\xff\xff\xff", b"\x82\xa4type" * 3):
        assert opened.chutes.cast(frame, 0, 7.0) is None


def test_a_slot_is_used_again_and_a_name_only_once_at_a_time(kernels: ctypes.CDLL) -> None:
    opened = Opened(kernels)
    again = Stream(("a", 2))
    assert opened.chutes.open(again, again.channel()) is None
    first = opened.chutes._open[0]
    first.close()
    chute = opened.chutes.open(again, again.channel())
    assert chute is not None
    assert chute.slot == first.slot
    assert len(opened.chutes) == 2


async def test_a_socket_that_is_full_gets_no_more_until_it_is_opened_anew(
    kernels: ctypes.CDLL,
) -> None:
    opened = Opened(kernels)
    full = Stream(("c", 1))
    full.send = lambda data: False  # type: ignore[method-assign]
    assert opened.chutes.open(full, full.channel()) is not None
    delta = CoreDelta("c", 1, 0, "text", (1,), (), Usage(1, 0, 1))
    frame = encode(StepFrame(deltas=(delta,)))
    assert opened.rest(frame) == []
    assert opened.rest(frame) == [delta]
    assert len(full.told) == 1
    await asyncio.sleep(0)


class Piped(Stream):
    """A stream whose socket is real and small; what that does not take waits in `backlog`."""

    def __init__(self, key: tuple[str, int]) -> None:
        super().__init__(key)
        self.ours, self.theirs = socket.socketpair()
        for end in (self.ours, self.theirs):
            end.setblocking(False)
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.backlog, self.got, self.sends = b"", b"", 0

    def send(self, data: bytes) -> bool:
        self.sends += 1
        self.backlog += data
        return True

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.backlog:
                self.backlog = self.backlog[self.ours.send(self.backlog) :]

    def read(self, size_bytes: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.got += self.theirs.recv(size_bytes)

    def channel(self) -> Channel:
        idle = lambda: not self.backlog  # noqa: E731
        return Channel(BEFORE, BEHIND, 7.0, self.send, self.took, self.ours.fileno(), idle)


@pytest.fixture
def piped() -> Iterator[Piped]:
    stream = Piped(("p", 1))
    yield stream
    stream.ours.close()
    stream.theirs.close()


def _text(text: str) -> bytes:
    return encode(StepFrame(deltas=(CoreDelta("p", 1, 0, text, (1,), (), Usage(1, 0, 1)),)))


def _chunk(text: str) -> bytes:
    event = BEFORE + to_json(text) + BEHIND
    return b"%x\r\n%b\r\n" % (len(event), event)


@given(st.lists(st.integers(0, 9_000) | st.sampled_from(["flush", "read"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_what_a_socket_does_not_take_at_once_is_not_overtaken(
    kernels: ctypes.CDLL, steps: list[int | str]
) -> None:
    stream, expected = Piped(("p", 1)), b""
    chutes = Chutes(kernels, Histogram("gaps", "gaps", BOUNDS))
    chute = chutes.open(stream, stream.channel())
    assert chute is not None
    for number, step in enumerate(steps):
        if step == "flush":
            stream.flush()
        elif step == "read":
            stream.read(6_000)
        else:
            text = f"{number}." * int(step)
            assert chutes.cast(_text(text), 0, 7.0) is not None
            expected += _chunk(text) if text else b""
    chute.close()
    while len(stream.got) < len(expected):
        stream.flush()
        stream.read(1 << 16)
    assert stream.got == expected
    stream.ours.close()
    assert stream.theirs.recv(1) == b""
    stream.theirs.close()


def test_a_socket_that_takes_all_is_written_to_directly(kernels: ctypes.CDLL, piped: Piped) -> None:
    chutes = Chutes(kernels, Histogram("gaps", "gaps", BOUNDS))
    piped.backlog = b"head"
    assert chutes.open(piped, piped.channel()) is not None
    chutes.cast(_text("a"), 0, 7.0)
    assert piped.sends == 1
    piped.flush()
    chutes.cast(_text("b"), 0, 7.0)
    assert piped.sends == 1
    piped.read(1 << 16)
    assert piped.got == b"head" + _chunk("a") + _chunk("b")


def test_a_file_that_gets_the_number_of_a_closed_socket_gets_nothing(
    kernels: ctypes.CDLL, piped: Piped
) -> None:
    chutes = Chutes(kernels, Histogram("gaps", "gaps", BOUNDS))
    assert chutes.open(piped, piped.channel()) is not None
    number = piped.ours.fileno()
    piped.ours.close()
    other, end = socket.socketpair()
    with other, end:
        assert number in (other.fileno(), end.fileno())
        chutes.cast(_text("a"), 0, 7.0)
        for mine in (other, end):
            mine.setblocking(False)
            with pytest.raises(BlockingIOError):
                mine.recv(1)
    piped.read(1 << 16)
    assert piped.got == _chunk("a")


def test_who_is_gone_is_told_to_the_transport(kernels: ctypes.CDLL, piped: Piped) -> None:
    chutes = Chutes(kernels, Histogram("gaps", "gaps", BOUNDS))
    assert chutes.open(piped, piped.channel()) is not None
    piped.theirs.close()
    chutes.cast(_text("a"), 0, 7.0)
    assert piped.backlog == _chunk("a")
