"""Events on their way: whole ones, as they came, none behind one that nobody can read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.events import MAX_EVENT_BYTES, Events
from router.backends.tail import ToldUsage

USAGE_EVENT = (
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
TEXTS = st.text(st.sampled_from('a"\\\n[]{}:choicesusage \u00e9'), max_size=60)
COMMENTS = st.sampled_from([b"", b": keep-alive\n\n", b"event: message\n", b"id: 7\nretry: 10\n"])


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def passed(events: Events, whole: bytes, cuts: list[int]) -> bytes:
    """What comes of it in reads that are cut so."""
    places = sorted(min(cut, len(whole)) for cut in cuts)
    reads = zip([0, *places], [*places, len(whole)], strict=True)
    return b"".join([events.feed(whole[start:end]) for start, end in reads]) + events.rest()


CUTS = st.lists(st.integers(0, 2_000), max_size=6)


@given(st.lists(TEXTS, max_size=8), CUTS, st.booleans())
def test_only_the_usage_event_is_taken_out_however_reads_are_cut(
    texts: list[str], cuts: list[int], drop: bool
) -> None:
    content = b"".join(map(event, texts))
    events = Events(drop_usage=drop)
    usage = b"" if drop else USAGE_EVENT
    assert passed(events, content + USAGE_EVENT + DONE, cuts) == content + usage + DONE
    assert events.complete
    assert events.usage() == ToldUsage(40, 3, 32)


@given(st.lists(st.tuples(COMMENTS, TEXTS), max_size=8), CUTS, st.sampled_from([b"\n", b"\r\n"]))
def test_good_events_are_passed_on_byte_for_byte(
    parts: list[tuple[bytes, str]], cuts: list[int], line_end: bytes
) -> None:
    whole = b"".join(comment + event(text) for comment, text in parts) + DONE.rstrip()
    whole = whole.replace(b"\n", line_end)
    events = Events()
    assert passed(events, whole, cuts) == whole
    assert (events.complete, events.broken, events.failed) == (True, False, False)


@given(st.lists(TEXTS, max_size=4), CUTS, st.data())
def test_R17_nothing_behind_a_broken_event_is_passed_on(
    texts: list[str], cuts: list[int], data: st.DataObject
) -> None:
    good = b"".join(map(event, texts))
    last = event("last")
    length = data.draw(st.integers(len("data: {"), len(last) - 4))
    events = Events()
    assert passed(events, good + last[:length] + b"\n\n" + DONE, cuts) == good
    assert events.broken


@pytest.mark.parametrize("number", ['"\\ud83d"', "NaN", "-Infinity", "1e999"])
def test_what_python_servers_write_is_good_enough(number: str) -> None:
    events = Events()
    odd = b'data: {"choices": [{"logprobs": %b}]}\n\n' % number.encode()
    assert events.feed(odd) == odd


def test_data_in_several_lines_is_one_event() -> None:
    events = Events()
    lines = b'data: {"choices":\ndata: []}\n\n'
    assert events.feed(lines) == lines


def test_memory_is_bounded() -> None:
    events, fed = Events(), 0
    while not events.broken:
        assert events.feed(b"data: " + b"x" * 1_000_000) == b""
        fed += 1_000_006
    assert fed <= MAX_EVENT_BYTES + 1_000_006


def test_an_error_inside_of_a_stream_is_seen() -> None:
    events = Events()
    events.feed(b'data: {"error": {"message": "out of memory"}}\n\n' + 40_000 * b": \n\n" + DONE)
    assert events.failed
    quoting = Events()
    quoting.feed(event('data: {"error": 1}') + b'data: {"error": null}\n\n' + DONE)
    assert not quoting.failed
