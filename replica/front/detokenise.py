"""Token ids to text, one token at a time. Knows UTF-8 and the vocabulary, nothing of stops.

A character whose bytes are spread over several tokens is decided with its last byte, so a half
character is never shown; bytes that are no UTF-8 at all become U+FFFD, as in a full decode.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

MAX_UNDECIDED_TOKENS = 8
"""An incomplete character that this many tokens leave incomplete is given up as U+FFFD."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """What the front needs of a tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token."""


class Detokeniser:
    """The text of one child; special tokens have none. At most 3 bytes are undecided."""

    __slots__ = ("_decoder", "_undecided_tokens", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = _new_decoder(errors="replace")
        self._undecided_tokens = 0

    def push(self, token_id: int) -> str:
        """The text that this token decides; may be empty. Raises on an id that is no token."""
        special = token_id in self._vocabulary.special_ids
        data = b"" if special else self._vocabulary.token_bytes(token_id)
        text = self._decoder.decode(data)
        self._undecided_tokens = self._undecided_tokens + 1 if self.undecided else 0
        if self._undecided_tokens > MAX_UNDECIDED_TOKENS:
            text += self.flush()
        return text

    @property
    def undecided(self) -> bool:
        """Whether the last character still lacks bytes."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The end: what is still undecided becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._undecided_tokens = 0
        return text


def decode(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """The full decode that joined deltas must equal."""
    plain = (vocabulary.token_bytes(t) for t in token_ids if t not in vocabulary.special_ids)
    return b"".join(plain).decode("utf-8", errors="replace")
