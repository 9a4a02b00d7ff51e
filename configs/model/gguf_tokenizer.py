"""Tokenizer and chat template from a GGUF's metadata; ids equal llama.cpp's (the tests say so)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from configs.model.cuts import LLAMA_WORDS, QWEN_WORDS
from configs.model.errors import ModelError
from configs.model.metadata import Metadata
from configs.model.text import ModelText, build_template, end_ids
from configs.model.tokenizer import Tokenizer, with_all_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(words: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(LLAMA_WORDS),
    "qwen2": lambda: _split(QWEN_WORDS),
}
"""By `tokenizer.ggml.pre`: how text is cut before merges apply."""


def _vocabularies(metadata: Metadata) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Spelling to id of the normal, the special and the added tokens."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    kinds = metadata.ints("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens, but {len(kinds)} token types")
    if len(set(tokens)) != len(tokens):
        raise ModelError("two tokens have the same spelling")
    normal: dict[str, int] = {}
    special: dict[str, int] = {}
    added: dict[str, int] = {}
    homes = {NORMAL: normal, CONTROL: special, UNKNOWN: special, USER_DEFINED: added}
    for token, (spelling, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == BYTE:
            raise ModelError("byte-fallback vocabularies are not supported")
        if kind in homes:
            homes[kind][spelling] = token
    return normal, special, added


def _merges(metadata: Metadata, known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. Those that touch a special token can never apply and are left out."""
    pairs = []
    for line in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left in known and right in known and left + right in known:
            pairs.append((left, right))
    return pairs


def _fingerprint(metadata: Metadata) -> str:
    digest = hashlib.sha256(b"wr-tokenizer-gguf-1")
    for key in ("model", "pre"):
        digest.update(metadata.string(f"tokenizer.ggml.{key}").encode() + b"\0")
    for key in ("tokens", "merges"):
        strings = metadata.strings(f"tokenizer.ggml.{key}")
        digest.update(len(strings).to_bytes(8, "little"))
        raw = [text.encode() for text in strings]
        digest.update(b"".join(len(each).to_bytes(4, "little") for each in raw))
        digest.update(b"".join(raw))
    digest.update(bytes(kind & 255 for kind in metadata.ints("tokenizer.ggml.token_type")))
    return digest.hexdigest()


def build_tokenizer(metadata: Metadata, vocab_size: int) -> Tokenizer:
    """Raises ModelError for a kind of tokenizer that isn't supported."""
    kind = metadata.string("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"tokenizer model '{kind}' is not supported (only byte-level 'gpt2')")
    pre = metadata.string("tokenizer.ggml.pre", "unnamed")
    if pre not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"pre-tokenizer '{pre}' is not supported (only {supported})")
    vocab, specials, added = _vocabularies(metadata)
    # Added tokens stand in the vocabulary too, which keeps the library from renumbering them.
    known = with_all_bytes(vocab, vocab_size) | added
    model = BPE(known, _merges(metadata, known), ignore_merges=pre == "llama-bpe")
    backend = Backend(model)
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(backend, vocab, specials, added, vocab_size)


def read_text(metadata: Metadata, vocab_size: int) -> ModelText:
    """The text side of the model. Raises ModelError."""
    tokenizer = build_tokenizer(metadata, vocab_size)
    named = {
        f"{name}_token": metadata.token(f"tokenizer.ggml.{key}_token_id", vocab_size)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    more = (metadata.token(f"tokenizer.ggml.{key}_token_id", vocab_size) for key in ("eot", "eom"))
    template = metadata.string("tokenizer.chat_template", "")
    variables = {
        name: tokenizer.token_bytes(token).decode(errors="replace")
        for name, token in named.items()
        if token is not None
    }
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", False)
    return ModelText(
        tokenizer=tokenizer,
        tokenizer_fingerprint=_fingerprint(metadata),
        template=build_template(template, tokenizer, variables),
        bos_id=named["bos_token"] if adds_bos else None,
        eos_ids=end_ids((named["eos_token"], *more), vocab_size),
    )
