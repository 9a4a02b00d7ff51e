"""The vocabulary as the grammar library wants it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

from replica.front.detokenise import Vocabulary


class Spelling(Vocabulary, Protocol):
    """A vocabulary that can also be written with."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, never special ones."""


class _Listing:
    """What the library asks of a tokenizer. A special token must not match text that spells it."""

    def __init__(self, vocabulary: Spelling, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id: int | None = None
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.vocab_size)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        """Where the grammar leaves one text only, its tokens are those that the model learnt."""
        return self._vocabulary.encode(text)


def grammar_tokenizer(vocabulary: Spelling, eos_ids: Collection[int]) -> LLTokenizer:
    """Takes a quarter of a second for 50,000 tokens. `eos_ids` must not be empty."""
    ends = sorted(eos_ids)
    listing = TokenizerWrapper(_Listing(vocabulary, ends[0]))
    return LLTokenizer(listing, n_vocab=vocabulary.vocab_size, eos_token=ends)
