"""The small parts: the end of an answer, the body on its way up, learnt rates."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.body import rewrite
from router.backends.rates import LineFit, Rates
from router.backends.tail import KEPT_BYTES, MAX_HELD_BYTES, Tail, ToldUsage

USAGE_EVENT = (
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
)
TEXTS = st.text(st.sampled_from('a"\\\n[]{}:choicesusage \u00e9'), max_size=60)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


@given(st.lists(TEXTS, max_size=8), st.data())
def test_only_the_usage_event_is_taken_out_however_reads_are_cut(
    texts: list[str], data: st.DataObject
) -> None:
    content = b"".join(map(event, texts))
    whole = content + USAGE_EVENT + b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    tail, passed = Tail(True, drop_usage=True), b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        passed += tail.feed(whole[start:end])
    assert passed + tail.rest() == content + b"data: [DONE]\n\n"
    assert tail.complete
    assert tail.usage() == ToldUsage(40, 3, 32)


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_where_nothing_is_taken_out_bytes_are_bytes(pieces: list[bytes]) -> None:
    tail = Tail(True)
    assert b"".join(map(tail.feed, pieces)) == b"".join(pieces)


def test_carriage_returns_end_events_too() -> None:
    tail = Tail(True, drop_usage=True)
    crlf = USAGE_EVENT.replace(b"\n", b"\r\n")
    assert tail.feed(b"data: 1\r\n\r\n" + crlf + b"data: [DONE]\r\n\r\n") == (
        b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n"
    )
    assert tail.complete
    assert tail.between_events


def test_memory_is_bounded() -> None:
    tail = Tail(True, drop_usage=True)
    assert len(tail.feed(b"data: " + b"x" * 1_000_000)) == 1_000_006
    for _ in range(1_000):
        tail.feed(b"y" * 1_000)
    assert len(tail.rest()) <= MAX_HELD_BYTES
    assert tail._kept_bytes <= KEPT_BYTES + 1_000


def test_an_error_inside_of_a_stream_is_seen() -> None:
    tail = Tail(True)
    tail.feed(b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n')
    assert tail.failed
    quoting = Tail(True)
    quoting.feed(event('data: {"error": 1}') + b"data: [DONE]\n\n")
    assert not quoting.failed


@pytest.mark.parametrize("told", [b'"usage": {broken', b'"usage": null', b"{}", b'"usage":{"a":1}'])
def test_a_usage_that_says_nothing(told: bytes) -> None:
    tail = Tail(False)
    tail.feed(b"{" + told + b"}")
    usage = tail.usage()
    assert usage is None or usage.cached_tokens is None


def test_a_plain_answer_has_its_usage_at_the_end() -> None:
    tail = Tail(False)
    tail.feed(b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n')
    assert tail.usage() == ToldUsage(5, 2, None)
    assert tail.complete


def test_the_body_keeps_its_bytes() -> None:
    body = b'{ "model": "a", "n": 1.50e2, "stream_options": {"include_obfuscation": false} }'
    sent = rewrite(body, "up", "tag", True)
    assert sent == (
        b'{"model":"up","n":1.50e2,'
        b'"stream_options":{"include_obfuscation":false,"include_usage":true},"cache_salt":"tag"}'
    )
    assert rewrite(b'{"model":"a","stream_options":null}', "up", None, True) == (
        b'{"model":"up","stream_options":{"include_usage":true}}'
    )


def test_a_line_is_learnt_and_never_negative() -> None:
    fit = LineFit()
    assert fit.line() == (0.0, 0.0)
    fit.add(100, 50.0)
    assert fit.line() == (0.0, 0.5)
    for tokens in (100, 500, 1000, 2000) * 10:
        fit.add(tokens, 20.0 + 0.4 * tokens)
    base, slope = fit.line()
    assert base == pytest.approx(20.0, abs=3.0)
    assert slope == pytest.approx(0.4, abs=0.02)
    falling = LineFit()
    for x, y in ((1, 100.0), (100, 1.0)):
        falling.add(x, y)
    assert falling.line()[1] == 0.0


def test_short_answers_tell_nothing_of_decoding() -> None:
    rates = Rates()
    rates.decoded(1, 2, 100.0)
    assert rates.decode.confidence == 0.0
    rates.decoded(1, 11, 100.0)
    assert rates.decode.predict_ms(1, 0) == pytest.approx(10.0)
