"""Tokens to text: never a half character, never a stop string, the same whatever the steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.output import TokenLogprob
from replica.front.detokenise import MAX_UNDECIDED_TOKENS, Detokeniser, decode
from replica.front.stops import StopFinder
from replica.front.stream import Piece, TokenStream
from tests.fakes.vocabulary import END_ID, ByteVocabulary

WORDS = (b"own f", b"ox", b"br", b"ab", b"aba", b"\xf0\x9f", b"\x98\x80!", b"\xe4\xb8", b"\xad\xe4")
VOCABULARY = ByteVocabulary(WORDS)


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 7)


def run(
    ids: Sequence[int], stops: Sequence[str], cuts: Sequence[int] = (), min_tokens: int = 0
) -> tuple[list[Piece], str | None, int]:
    """Feed `ids`, take after each cut; the pieces, the stop string, and the tokens counted."""
    stream = TokenStream(VOCABULARY, stops, min_tokens)
    pieces = []
    for index, token in enumerate(ids):
        if not stream.push(token, logprob(token)):
            break
        if index in cuts:
            pieces.append(stream.take())
    pieces.append(stream.finish())
    return pieces, stream.stopped_by, stream.tokens


def joined(pieces: Sequence[Piece]) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...]]:
    return (
        "".join(p.text for p in pieces),
        tuple(t for p in pieces for t in p.token_ids),
        tuple(lp for p in pieces for lp in p.logprobs),
    )


def every(ids: Sequence[int]) -> range:
    return range(len(ids))


def spell(text: str) -> list[int]:
    return list(text.encode())


tokens = st.lists(
    st.one_of(
        st.sampled_from(spell("ab own fox")),
        st.integers(256, 255 + len(WORDS)),
        st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xFF, END_ID]),
    ),
    max_size=24,
)
stop_lists = st.lists(
    st.sampled_from(["own fox", "own", "ab", "aba", "abab", "x", "😀", "!a", "\ufffd", "  "]),
    max_size=3,
)


@given(tokens, stop_lists, st.sets(st.integers(0, 24)), st.integers(0, 4))
def test_P4_any_split_into_steps_gives_the_same(
    ids: list[int], stops: list[str], cuts: set[int], min_tokens: int
) -> None:
    one_by_one = run(ids, stops, every(ids), min_tokens)
    split = run(ids, stops, sorted(cuts), min_tokens)
    assert joined(split[0]) == joined(one_by_one[0])
    assert split[1:] == one_by_one[1:]


@given(tokens, st.sets(st.integers(0, 24)))
def test_P6_joined_deltas_equal_the_full_decode(ids: list[int], cuts: set[int]) -> None:
    text, kept, logprobs = joined(run(ids, (), sorted(cuts))[0])
    assert text == decode(VOCABULARY, ids)
    assert list(kept) == ids
    assert [entry.token_id for entry in logprobs] == ids


@given(tokens, stop_lists)
def test_P4_the_earliest_completion_wins_and_nothing_of_it_is_shown(
    ids: list[int], stops: list[str]
) -> None:
    full = decode(VOCABULARY, ids)
    ends = [(full.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in full]
    pieces, stopped_by, _ = run(ids, stops, every(ids))
    text = joined(pieces)[0]
    if not ends:
        assert (text, stopped_by) == (full, None)
    else:
        end, length, stop = min(ends)
        assert (text, stopped_by) == (full[: end + length], stop)


@given(tokens, stop_lists)
def test_P4_text_and_ids_end_at_the_same_token(ids: list[int], stops: list[str]) -> None:
    text, kept, logprobs = joined(run(ids, stops, every(ids))[0])
    assert [entry.token_id for entry in logprobs] == list(kept) == ids[: len(kept)]
    assert decode(VOCABULARY, kept).replace("\ufffd", "").startswith(text.replace("\ufffd", ""))
    # The last token is needed: without it some of the text would be missing.
    if kept and kept[-1] != END_ID and text:
        assert len(decode(VOCABULARY, kept[:-1])) <= len(text)


@given(tokens, stop_lists)
def test_sent_text_is_a_prefix_of_the_final_text_at_every_token(
    ids: list[int], stops: list[str]
) -> None:
    final = joined(run(ids, stops)[0])[0]
    shown = ""
    for piece in run(ids, stops, every(ids))[0]:
        shown += piece.text
        assert final.startswith(shown)
    assert shown == final


@given(tokens, stop_lists, st.integers(0, 24), st.integers(0, 4))
def test_R16_a_stream_that_goes_on_elsewhere_says_what_an_unbroken_one_says(
    ids: list[int], stops: list[str], broken_at: int, min_tokens: int
) -> None:
    first = TokenStream(VOCABULARY, stops, min_tokens)
    pieces = []
    for token in ids[:broken_at]:
        if not first.push(token, logprob(token)):
            return
        pieces.append(first.take())
    delivered = joined(pieces)[1]
    second = TokenStream(VOCABULARY, stops, min_tokens)
    assert second.replay(delivered)
    for token in ids[len(delivered) :]:
        if not second.push(token, logprob(token)):
            break
        pieces.append(second.take())
    pieces.append(second.finish())
    whole, stopped_by, counted = run(ids, stops, every(ids), min_tokens)
    assert joined(pieces) == joined(whole)
    assert (second.stopped_by, second.tokens) == (stopped_by, counted)


def test_R16_what_goes_beyond_a_stop_string_can_not_go_on() -> None:
    assert not TokenStream(VOCABULARY, ["own"]).replay(spell("my own fox"))


def test_P4_split_over_tokens_and_cut_inside_a_token() -> None:
    pieces, stopped_by, counted = run([258, 256, 257, 0x21], ["own fox"], every([1] * 4))
    assert joined(pieces)[:2] == ("br", (258,))
    assert (stopped_by, counted) == ("own fox", 3)
    pieces, _, _ = run([*spell("x "), 258, 256, 257], ["wn fox"], every([1] * 5))
    assert joined(pieces)[:2] == ("x bro", (*spell("x "), 258, 256))


def test_P4_a_stop_that_is_a_prefix_of_another() -> None:
    assert run(spell("my own fox"), ["own fox", "own"])[1] == "own"
    assert run(spell("a fox"), ["fox", "a fox"])[1] == "a fox"


def test_P4_text_that_could_begin_a_stop_is_held_and_then_shown() -> None:
    stream = TokenStream(VOCABULARY, ["own fox"])
    for token in spell("my own"):
        stream.push(token)
    assert stream.take().text == "my "
    stream.push(ord("!"))
    assert stream.take().text == "own!"


def test_P4_stop_at_the_very_end_of_the_text() -> None:
    assert joined(run(spell("abc own fox"), ["own fox"])[0])[0] == "abc "


def test_min_tokens_disarm_a_stop_string() -> None:
    assert run(spell("xaxa"), ["a"], min_tokens=2)[1:] == ("a", 4)
    assert joined(run(spell("xaxa"), ["a"], min_tokens=2)[0])[0] == "xax"


@pytest.mark.parametrize("text", ["😀", "👩‍👩‍👧‍👦 ok", "中文字", "e\u0301", "naïve"])
def test_P6_no_replacement_character_unless_in_the_data(text: str) -> None:
    pieces = run(spell(text), (), every(spell(text)))[0]
    assert "".join(p.text for p in pieces) == text
    assert all("\ufffd" not in p.text for p in pieces)


def test_P6_a_lone_byte_at_the_end_is_flushed() -> None:
    pieces, _, _ = run([0x61, 0xF0, 0x9F], (), every([1] * 3))
    assert joined(pieces)[0] == "a\ufffd"
    assert joined(pieces)[1] == (0x61, 0xF0, 0x9F)


def test_the_undecided_window_is_bounded() -> None:
    detokeniser = Detokeniser(VOCABULARY)
    texts = [detokeniser.push(token) for token in [0xF0, *[END_ID] * MAX_UNDECIDED_TOKENS]]
    assert texts[-1] == "\ufffd"
    assert not detokeniser.undecided


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_held_is_the_longest_end_that_could_begin_a_stop(
    text: str, stops: list[str]
) -> None:
    finder = StopFinder(stops)
    finder.push(text, armed=False)
    ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    assert finder.held == max(ends, default=0)


def test_the_end_token_is_counted_and_shown_nowhere() -> None:
    stream = TokenStream(VOCABULARY, ["fox"])
    stream.push(ord("a"))
    stream.end_with(END_ID)
    assert stream.finish().text == "a"
    assert stream.tokens == 2
    stopped = TokenStream(VOCABULARY, ["a"])
    stopped.push(ord("a"))
    stopped.end_with(END_ID)
    assert stopped.tokens == 1
