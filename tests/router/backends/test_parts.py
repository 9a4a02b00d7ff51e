"""The small parts: the end of an answer, the body on its way up, learnt rates."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.backends.body import rewrite
from router.backends.rates import LineFit, Rates
from router.backends.tail import KEPT_BYTES, Tail, ToldUsage


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_bytes_are_bytes(pieces: list[bytes]) -> None:
    tail = Tail()
    assert b"".join(map(tail.feed, pieces)) == b"".join(pieces)


def test_memory_is_bounded() -> None:
    tail = Tail()
    for size in (1_000_000, *[1_000] * 1_000):
        tail.feed(b"y" * size)
    assert tail._kept_bytes <= KEPT_BYTES + 1_000


ANSWERS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='"\\\\{}[]x\n', max_size=12),
        lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some),
        max_leaves=8,
    ),
    max_size=4,
)


@given(ANSWERS, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=50)
def test_R17_an_answer_of_no_told_length_is_whole_at_its_last_brace_and_nowhere_else(
    answer: dict, escaped: bool, sizes: list[int]
) -> None:
    """In whatever parts it comes."""
    text = json.dumps(answer, ensure_ascii=escaped).encode()
    tail, at = Tail(measured=False), 0
    for size in itertools.cycle(sizes):
        tail.feed(text[at : at + size])
        at += size
        assert tail.complete == (at >= len(text))
        if at >= len(text):
            break


def test_R17_a_long_answer_of_no_told_length_is_not_taken_for_whole_where_it_is_cut() -> None:
    """Beyond what anybody would keep."""
    tail = Tail(measured=False)
    tail.feed(b'{"choices": [')
    for _ in range(200):
        tail.feed(b'{"text": "' + b'a \\" } ' * 10_000 + b'"},')
    tail.feed(b'{"text": "x"}')
    assert not tail.complete
    tail.feed(b'], "usage": {}}')
    assert tail.complete
    assert tail._kept_bytes <= 2 * KEPT_BYTES


@pytest.mark.parametrize("told", [b'"usage": {broken', b'"usage": null', b"{}", b'"usage":{"a":1}'])
def test_a_usage_that_says_nothing(told: bytes) -> None:
    tail = Tail()
    tail.feed(b"{" + told + b"}")
    usage = tail.usage()
    assert usage is None or usage.cached_tokens is None


def test_a_plain_answer_has_its_usage_at_the_end() -> None:
    tail = Tail()
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
