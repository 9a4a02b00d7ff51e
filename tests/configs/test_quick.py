"""What makes encoding quick gives the very ids of the library's own encoding of the whole."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.cuts import DIGITS_TOO, LLAMA_WORDS, QWEN_WORDS, WORDS_ONLY, cut, places
from configs.model.gguf import GGUFFile
from configs.model.gguf_tokenizer import build_tokenizer
from configs.model.metadata import Metadata
from configs.model.quick import CHECK_EVERY, Checked, quick_encoder
from configs.model.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_llama_cpp.json").read_text())
PRE = ["smollm", "llama-bpe"]
PRE += [pytest.param(pre, marks=pytest.mark.slow) for pre in ("gpt-2", "qwen2")]
ATOMS = [
    *("a", "the", "Hello", " ", "  ", "\n", "\t", "'s", "'S", "'ll", "'", "é", "e\u0301", "Привет"),
    *("0", "42", "½", "²", ".", "!?", "_", "-", "你好", "ſ", "\u00a0", "😀", "<|im_end|>", "×"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(ATOMS), st.text(max_size=4)), max_size=60).map("".join)


@pytest.fixture(scope="module", params=PRE)
def tokenizer(request: pytest.FixtureRequest, real_model: Path) -> Tokenizer:
    """The real vocabulary under each pre-tokenizer, quickened."""
    metadata = GGUFFile(real_model).metadata | {"tokenizer.ggml.pre": request.param}
    made = build_tokenizer(Metadata(metadata), 49_152)
    made.quicken()
    return made


def joined(tokenizer: Tokenizer, text: str, chars: int) -> list[int]:
    pieces = list(tokenizer.pieces(text, chars))
    assert "".join(pieces) == text
    return [token for piece in pieces for token in tokenizer.encode(piece)]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the library gives them, less what stands for bytes that no token can spell."""
    return [token for token in tokenizer._library_ids(text) if token < tokenizer.vocab_size]


@settings(max_examples=300)
@given(text=TEXTS, chars=st.integers(1, 40))
def test_ids_of_pieces_are_those_of_the_whole(tokenizer: Tokenizer, text: str, chars: int) -> None:
    assert joined(tokenizer, text, chars) == whole(tokenizer, text)


def test_a_manual_in_pieces(tokenizer: Tokenizer) -> None:
    text = "\n".join(topics.values())[:60_000]
    expected = whole(tokenizer, text)
    for chars in (16, 256, 4_096):
        assert len(list(tokenizer.pieces(text, chars))) > 60_000 // (3 * chars)
        assert joined(tokenizer, text, chars) == expected


def test_hard_strings_side_by_side(tokenizer: Tokenizer) -> None:
    strings = RECORDED["strings"]
    random.Random(1).shuffle(strings)
    text = " and then ".join(strings)
    assert joined(tokenizer, text, 8) == whole(tokenizer, text)


def test_equal_beginnings_have_equal_pieces() -> None:
    first = list(cut("alpha beta gamma delta epsilon", 8))
    assert first == ["alpha beta", " gamma delta", " epsilon"]
    assert list(cut("alpha beta gamma delta zeta eta", 8))[:2] == first[:2]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
LLAMA = {"type": "Split", "pattern": {"Regex": LLAMA_WORDS}, "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LLAMA, BYTES]}}, True),
        ({"pre_tokenizer": BYTES | {"use_regex": True}, "normalizer": {"type": "NFC"}}, True),
        ({"pre_tokenizer": BYTES}, False),
        ({"pre_tokenizer": BYTES | {"use_regex": True, "add_prefix_space": True}}, False),
        ({"pre_tokenizer": BYTES | {"use_regex": True}, "normalizer": {"type": "NFKC"}}, False),
        ({"pre_tokenizer": LLAMA | {"behavior": "MergedWithNext"}}, False),
        ({"pre_tokenizer": LLAMA | {"pattern": {"Regex": r"\w+ \w+"}}}, False),
        ({"pre_tokenizer": LLAMA, "added_tokens": [{"content": "for you"}]}, False),
        ({"pre_tokenizer": LLAMA, "added_tokens": [{"content": "<think>"}]}, True),
        ({"pre_tokenizer": LLAMA, "added_tokens": [{"content": "stop", "rstrip": True}]}, False),
        ({"pre_tokenizer": LLAMA, "added_tokens": [{"content": "<s>", "rstrip": True}]}, True),
        ({"pre_tokenizer": LLAMA, "added_tokens": [{"content": "x", "single_word": True}]}, False),
        ({"pre_tokenizer": None}, False),
        ({"pre_tokenizer": {"type": "Metaspace"}}, False),
    ],
)
def test_only_known_tokenizers_are_cut(spec: dict, expected: bool) -> None:
    assert (places({"model": {}, **spec}) is not None) is expected


QWEN = LLAMA | {"pattern": {"Regex": QWEN_WORDS}}
DIGITS = {"type": "Digits", "individual_digits": True}
PLAIN = BYTES | {"use_regex": True}


@pytest.mark.parametrize(
    ("stages", "added", "expected"),
    [
        ([QWEN, BYTES], [], DIGITS_TOO),
        ([DIGITS, PLAIN], [], DIGITS_TOO),
        ([DIGITS | {"individual_digits": False}, PLAIN], [], WORDS_ONLY),
        ([LLAMA, BYTES], [], WORDS_ONLY),
        ([QWEN, BYTES], [{"content": "<h1>"}], WORDS_ONLY),
        ([DIGITS, BYTES], [], None),
    ],
)
def test_digits_are_cut_where_each_stands_alone(
    stages: list[dict], added: list[dict], expected: re.Pattern | None
) -> None:
    steps = {"type": "Sequence", "pretokenizers": stages}
    spec = {"model": {}, "pre_tokenizer": steps, "added_tokens": added}
    assert places(spec) is expected


def test_a_quick_encoder_that_errs_is_put_out_of_use(caplog: pytest.LogCaptureFixture) -> None:
    def oracle(text: str) -> list[int]:
        return [1]

    checked = Checked(lambda text: [2], oracle)
    answers = [checked("secret") for _ in range(CHECK_EVERY + 5)]
    assert answers[-6:] == [[1]] * 6
    assert not checked.trusted
    assert "secret" not in caplog.text


def test_what_the_quick_library_refuses_is_left_to_the_other() -> None:
    def oracle(text: str) -> list[int]:
        return []

    assert quick_encoder({"model": {"vocab": {"a": 0}}}, oracle) is oracle
