"""Text to token ids and back, for byte-level vocabularies. Knows nothing of files or templates.

The backend is a `tokenizers` BPE that was built without the special tokens, so no text, whatever
it says, can become one. Special tokens enter through `encode_segments` alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.model.cuts import DIGITS_TOO, cut, places
from configs.model.errors import ModelError
from configs.model.quick import Encode, quick_encoder
from configs.model.segment import Segment

# One prompt is encoded by one thread; the library's own pool would only compete with the engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def byte_letters() -> list[str]:
    """The letter that stands for each of the 256 bytes in a byte-level vocabulary."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


_TO_BYTE = {ord(letter): byte for byte, letter in enumerate(byte_letters())}


def with_all_bytes(vocab: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    """`vocab`, and an id from `vocab_size` on for each byte that it lacks.

    `Tokenizer` drops these ids. Without them the backend would leave out such a byte before it
    merges, and so join what stood on its two sides.
    """
    lacking = [letter for letter in byte_letters() if letter not in vocab]
    return {**vocab, **{letter: vocab_size + at for at, letter in enumerate(lacking)}}


def _token_bytes(spelling: str) -> bytes:
    try:
        return spelling.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        raise ModelError(f"token {spelling!r} is not byte-level") from None


def _table(vocab: Mapping[str, int], literal: Mapping[str, int], size: int) -> tuple[bytes, ...]:
    """The bytes of each id; ids that no token has are empty."""
    table = [b""] * size
    for spelling, token in vocab.items():
        table[token] = _token_bytes(spelling)
    for spelling, token in literal.items():
        table[token] = spelling.encode()
    return tuple(table)


class Tokenizer:
    """A byte-level BPE tokenizer. Safe to share between threads."""

    def __init__(
        self,
        backend: Any,
        vocab: Mapping[str, int],
        specials: Mapping[str, int],
        added: Mapping[str, int],
        vocab_size: int,
    ) -> None:
        """`backend` knows `vocab` (byte-level spelling to id) with all bytes, and the ordinary
        `added` tokens.

        `specials` and `added` are spelt as plain text. `vocab_size` is the model's, which may be
        padded above the last token. Raises ModelError where the ids or spellings can't be right.
        """
        ids = [*vocab.values(), *specials.values(), *added.values()]
        if any(not 0 <= token < vocab_size for token in ids) or len(set(ids)) != len(ids):
            raise ModelError(f"token ids are not distinct numbers below {vocab_size}")
        if "" in specials:
            raise ModelError("a special token has no spelling")
        self._backend = backend
        self._ids: Encode = self._library_ids
        self._place: re.Pattern[str] | None = None
        self._lossy = any(letter not in vocab for letter in byte_letters())
        self._bytes = _table(vocab, {**added, **specials}, vocab_size)
        self.specials: Mapping[str, int] = dict(specials)
        self.special_ids = frozenset(specials.values())
        self.vocab_size = vocab_size

    def quicken(self) -> None:
        """Take what is quicker and gives the same ids; for whoever encodes much. Takes a second."""
        spec = self.spec()
        self._place = places(spec)
        self._ids = quick_encoder(spec, self._library_ids)

    def spec(self) -> dict[str, Any]:
        """As in a tokenizer.json, without the special tokens."""
        spec: dict[str, Any] = json.loads(self._backend.to_str())
        return spec

    @property
    def cuts(self) -> bool:
        """Whether `pieces` cuts texts at all."""
        return self._place is not None

    @property
    def cuts_digits(self) -> bool:
        """Whether it does so behind each digit, too."""
        return self._place is DIGITS_TOO

    def pieces(self, text: str, chars: int) -> Iterable[str]:
        """`text` in pieces of about `chars` characters whose ids, joined, are those of the whole;
        in one piece where that can't be promised."""
        place = self._place
        return (text,) if place is None or len(text) <= chars else cut(text, chars, place)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, never a special one, no BOS. A byte that no token can spell is left
        out. Lone surrogates are a ValueError."""
        if not text:
            return []
        ids = self._ids(text)
        return [token for token in ids if token < self.vocab_size] if self._lossy else ids

    def _library_ids(self, text: str) -> list[int]:
        # Unlike `encode`, the batch call lets go of the interpreter lock and skips offsets.
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # what the library says of text that UTF-8 can't carry
            raise ValueError("the text holds half of a surrogate pair") from None
        ids: list[int] = batch[0].ids
        return ids

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Token ids of a rendered conversation."""
        ids: list[int] = []
        for segment in segments:
            if segment.special_id is None:
                ids += self.encode(segment.text)
            else:
                ids.append(segment.special_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        kept: Iterable[int] = ids
        if skip_special:
            kept = (token for token in ids if token not in self.special_ids)
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; of a special one, its spelling. Raises ValueError."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is not below {self.vocab_size}")
        return self._bytes[token_id]
