"""Texts to token ids: known pieces are looked up, only the others are tokenised.

A text is cut where the tokenizer breaks anyway (see configs/model/cuts.py), into large pieces and,
where one of them is not known, into small ones, the last of them finely: in the end word by word.
So a long text with a known beginning costs a few look-ups and what is new at its end: the words of
most questions have been asked before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from configs.model.tokenizer import Tokenizer
from router.openai import faults
from router.rendering.offload import Offload
from router.rendering.textcache import TextCache, pack

INLINE_CHARS = 2_048
"""Up to here the event loop tokenises by itself (1 ms at most)."""

LARGE_CHARS = 4_096
SMALL_CHARS = 256
TAIL_CHARS = 64
"""What a text ends with is cut once more, and what is new of that into words: it is where the next
one differs."""

MANY_PIECES = 8
"""Of more than so many the whole is remembered, too."""


class Pieces:
    """One per model. Its methods belong to the event loop; long texts go to threads."""

    def __init__(
        self, tokenizer: Tokenizer, context_tokens: int, known: TextCache, offload: Offload
    ) -> None:
        tokenizer.quicken()
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._known = known
        self._offload = offload
        vocab = range(tokenizer.vocab_size)
        self._max_token_bytes = max(len(tokenizer.token_bytes(token)) for token in vocab)

    async def join(self, parts: Sequence[bytes | str], tenant: str, param: str) -> bytes:
        """All parts as ids (u32 little endian), those that are ids already as they are.

        Raises UserError: 400 for what can't fit the context, 429 and 503 as Offload does.
        """
        pieces: list[bytes | str] = []
        cold: list[str] = []
        large: list[tuple[str, int, int]] = []
        texts = self._known.texts_of(tenant)
        for part in parts:
            if isinstance(part, bytes):
                pieces.append(part)
            elif part:
                self._look_up(part, texts, pieces, cold, large)
        if not (cold or large):
            return b"".join(pieces)  # type: ignore[arg-type]
        self.check_length(sum(map(len, cold)), param)
        fresh = await self._encode(list(dict.fromkeys(cold)), tenant) if cold else {}
        ids = [piece if isinstance(piece, bytes) else fresh[piece] for piece in pieces]
        for text, start, end in large:
            self._known.put(tenant, text, b"".join(ids[start:end]))
        return b"".join(ids)

    def _look_up(
        self,
        text: str,
        texts: OrderedDict[str, bytes],
        pieces: list[bytes | str],
        cold: list[str],
        large: list[tuple[str, int, int]],
    ) -> None:
        """Append what is known of `text` as ids and the rest as small texts, to `cold` too; and to
        `large` the unknown large pieces, with the place of their small ones."""
        cut, get, used = self._tokenizer.pieces, texts.get, texts.move_to_end
        for whole in cut(text, LARGE_CHARS):
            known = get(whole)
            if known is not None:
                used(whole)
                pieces.append(known)
                continue
            start = len(pieces)
            for small in cut(whole, SMALL_CHARS):
                ids = None if small is whole else get(small)
                if ids is not None:
                    used(small)
                    pieces.append(ids)
                    continue
                for bit in self._bits(small, get) if len(small) < SMALL_CHARS else (small,):
                    ids = None if bit is small else get(bit)
                    if ids is None:
                        cold.append(bit)
                        pieces.append(bit)
                    else:
                        used(bit)
                        pieces.append(ids)
            if len(pieces) > start + MANY_PIECES:
                large.append((whole, start, len(pieces)))

    def _bits(self, small: str, get: Callable[[str], bytes | None]) -> Iterator[str]:
        """What the end of a text is looked up in: those that are not known word by word."""
        cut = self._tokenizer.pieces
        for bit in cut(small, TAIL_CHARS):
            if bit is not small and get(bit) is not None:
                yield bit
            else:
                yield from cut(bit, 1)

    def check_length(self, chars: int, param: str) -> None:
        """Don't begin with what can't fit the context. Raises UserError."""
        at_least = -(-chars // self._max_token_bytes)
        if at_least >= self._context_tokens:
            raise faults.prompt_too_long(param, self._context_tokens, at_least, at_least=True)

    async def _encode(self, texts: list[str], tenant: str) -> dict[str, bytes]:
        """Tokenised and remembered."""
        fresh = dict(zip(texts, await self.encode(texts), strict=True))
        for text, found in fresh.items():
            self._known.put(tenant, text, found)
        return fresh

    async def encode(self, texts: list[str]) -> list[bytes]:
        """Tokenised: here, or in a thread where they are long. Raises UserError as Offload does."""
        chars = sum(map(len, texts))
        if chars <= INLINE_CHARS:
            return self._encode_now(texts, None)
        return await self._offload.run(chars, lambda stopped: self._encode_now(texts, stopped))

    def _encode_now(self, texts: list[str], stopped: threading.Event | None) -> list[bytes]:
        ids = []
        for text in texts:
            if stopped is not None and stopped.is_set():
                break
            ids.append(pack(self._tokenizer.encode(text)))
        return ids
