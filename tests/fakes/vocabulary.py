"""A byte-level vocabulary: ids 0 to 255 are the bytes, a few longer tokens, then specials."""

from __future__ import annotations

END_ID = 300


class ByteVocabulary:
    """`words` are further tokens, numbered from 256 (at most 40); 300 to 302 are specials."""

    def __init__(self, words: tuple[bytes, ...] = ()) -> None:
        self.vocab_size = 303
        self.special_ids = frozenset((300, 301, 302))
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes((token_id,))
        if token_id in self.special_ids:
            return b"<|special|>"
        return self._words[token_id - 256]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())
