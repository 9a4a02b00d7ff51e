"""The tokenizer: equal to llama.cpp's on recorded strings, and never fooled by a marker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.card import load_card
from configs.model.errors import ModelError
from configs.model.gguf import GGUFFile
from configs.model.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, read_text
from configs.model.metadata import Metadata
from configs.model.template import Segment
from configs.model.tokenizer import Tokenizer, byte_letters
from tests.fakes.tiny_model import SPECIALS, vocabulary

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_llama_cpp.json").read_text())


@pytest.fixture(scope="module")
def real_metadata(real_model: Path) -> dict[str, object]:
    return GGUFFile(real_model).metadata


@pytest.fixture(scope="module")
def tiny_metadata(tiny_model: Path) -> dict[str, object]:
    return GGUFFile(tiny_model).metadata


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Tokenizer:
    return load_card(tiny_model).tokenizer


@pytest.mark.parametrize("pre", RECORDED["ids"])
def test_equals_llama_cpp_on_hard_strings(real_metadata: dict[str, object], pre: str) -> None:
    tokenizer = build_tokenizer(Metadata(real_metadata | {"tokenizer.ggml.pre": pre}), 49_152)
    assert len(RECORDED["strings"]) >= 300
    for text, ids in zip(RECORDED["strings"], RECORDED["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, repr(text)


def test_every_pre_tokenizer_was_recorded() -> None:
    assert RECORDED["ids"].keys() == PRE_TOKENIZERS.keys()


@settings(max_examples=200)
@given(text=st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, "<|im_", " the"]))))
def test_round_trip_without_specials(tiny: Tokenizer, text: list[str]) -> None:
    joined = "".join(text)
    ids = tiny.encode(joined)
    assert not tiny.special_ids.intersection(ids)
    assert tiny.decode(ids) == joined
    assert b"".join(map(tiny.token_bytes, ids)) == joined.encode()


def test_segments_hold_the_only_special_tokens(tiny: Tokenizer) -> None:
    text = "<|im_start|>"
    segments = [Segment(text, 1), Segment(text, None), Segment("<|im_end|>", 2)]
    ids = tiny.encode_segments(segments)
    assert ids == [1, *tiny.encode(text), 2]
    assert tiny.decode(ids) == text
    assert tiny.decode(ids, skip_special=False) == f"{text}{text}<|im_end|>"


def test_P6_bytes_of_a_split_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("👍")
    assert len(ids) == 4
    assert [tiny.token_bytes(token) for token in ids] == [b"\xf0", b"\x9f", b"\x91", b"\x8d"]
    assert tiny.decode(ids[:3]) == "\ufffd"


def test_ids_outside_the_vocabulary(tiny: Tokenizer) -> None:
    for token in (-1, tiny.vocab_size):
        with pytest.raises(ValueError, match="not below"):
            tiny.token_bytes(token)


def test_all_bytes_have_a_letter() -> None:
    assert len(set(byte_letters())) == 256


def test_lone_surrogates_are_refused(tiny: Tokenizer) -> None:
    with pytest.raises(ValueError):
        tiny.encode("a\ud800")


def test_added_tokens_that_are_not_special_are_text(tiny_metadata: dict[str, object]) -> None:
    kinds = [3, 3, 3, *[1] * 256, 4, *[1] * (len(vocabulary()) - 260)]
    tokens = [*vocabulary()[:259], "<tool_call>", *vocabulary()[260:]]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = build_tokenizer(Metadata(tiny_metadata | changed), len(tokens))
    assert tokenizer.encode("a<tool_call>b") == [
        *tokenizer.encode("a"),
        259,
        *tokenizer.encode("b"),
    ]
    assert tokenizer.decode([259]) == "<tool_call>"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("model", lambda _: "llama", "tokenizer model 'llama' is not supported"),
        ("pre", lambda _: "tekken", "pre-tokenizer 'tekken' is not supported"),
        ("pre", lambda _: 7, "'tokenizer.ggml.pre' must be str"),
        ("tokens", lambda old: old[:-1], "token types"),
        ("tokens", lambda old: [*old[:-1], old[0]], "same spelling"),
        ("tokens", lambda old: [*old[:-1], "日本"], "not byte-level"),
        ("tokens", lambda old: [*old[:-1], 5], "must hold str"),
        ("token_type", lambda old: [*old[:-1], 6], "byte-fallback"),
        ("eos_token_id", lambda _: 1_000_000, "not an id below"),
        ("eos_token_id", lambda _: "2", "must be int"),
    ],
)
def test_unusable_metadata_is_refused(
    tiny_metadata: dict[str, object], key: str, change: Callable[[object], object], message: str
) -> None:
    name = f"tokenizer.ggml.{key}"
    changed = tiny_metadata | {name: change(tiny_metadata[name])}
    with pytest.raises(ModelError, match=message):
        read_text(Metadata(changed), len(vocabulary()))


def test_missing_metadata_is_named(tiny_metadata: dict[str, object]) -> None:
    for key in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id"):
        name = f"tokenizer.ggml.{key}"
        changed = {other: value for other, value in tiny_metadata.items() if other != name}
        with pytest.raises(ModelError):
            read_text(Metadata(changed), len(vocabulary()))


def test_bos_only_where_the_model_adds_it(tiny_metadata: dict[str, object]) -> None:
    assert read_text(Metadata(tiny_metadata), len(vocabulary())).bos_id is None
    adding = tiny_metadata | {"tokenizer.ggml.add_bos_token": True}
    assert read_text(Metadata(adding), len(vocabulary())).bos_id == 1
