"""Logprobs in the two shapes that OpenAI has for them.

Chat: one entry per token with its exact bytes, so that joining the bytes gives the text.
Completions: four parallel lists; a token that is no valid UTF-8 by itself is spelt "bytes:\\xf0".
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from configs.model.tokenizer import Tokenizer
from events.output import TokenLogprob
from router.openai.stream import to_json

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say."""

_CACHED_TOKENS = 16_384


def finite(logprob: float) -> float:
    """As JSON can say it. Also turns NaN into the lowest: `max` keeps its first argument then."""
    return min(0.0, max(_LOWEST, logprob))


def _number(logprob: float) -> bytes:
    return b"%.9g" % finite(logprob)


def _spelling(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenTexts:
    """What each token looks like in a reply; one per model, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat_parts = lru_cache(_CACHED_TOKENS)(self._chat_parts_of)
        self.spelling = lru_cache(_CACHED_TOKENS)(self._spelling_of)

    def raw(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text: none for a special token."""
        return b"" if self._special(token_id) else self._tokenizer.token_bytes(token_id)

    def exact(self, token_id: int) -> bytes:
        """Its bytes; of a special token, its spelling."""
        return self._tokenizer.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that came as ids."""
        return self._tokenizer.decode(token_ids, skip_special=False)

    def _special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_ids

    def _spelling_of(self, token_id: int) -> str:
        """For completions: text, or the escaped bytes of a token that is part of a character."""
        return _spelling(self._tokenizer.token_bytes(token_id))

    def _chat_parts_of(self, token_id: int) -> tuple[bytes, bytes]:
        """What stands before and after the number in a chat entry."""
        raw = self._tokenizer.token_bytes(token_id)
        shown = to_json(raw.decode("utf-8", "replace"))
        exact = to_json(list(self.raw(token_id)))
        return b'{"token":' + shown + b',"logprob":', b',"bytes":' + exact

    def chat_entries(self, entries: Sequence[TokenLogprob]) -> bytes:
        """The members of `logprobs.content`, comma-separated JSON."""
        return b",".join(map(self._chat_entry, entries))

    def _chat_entry(self, entry: TokenLogprob) -> bytes:
        head, tail = self._chat_parts(entry.token_id)
        top = b",".join(self._chat_alternative(*pair) for pair in entry.top)
        return head + _number(entry.logprob) + tail + b',"top_logprobs":[' + top + b"]}"

    def _chat_alternative(self, token_id: int, logprob: float) -> bytes:
        head, tail = self._chat_parts(token_id)
        return head + _number(logprob) + tail + b"}"


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a text completion. `top_logprobs` always holds the chosen token too. Nothing
    predicts the first token of a prompt: it has null twice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, more: CompletionLogprobs) -> None:
        """Append what a later delta brought."""
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs += more.top_logprobs


class OffsetCounter:
    """Where each token of one choice begins, in characters from the start of prompt and answer."""

    def __init__(self, texts: TokenTexts, start: int) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start

    def lists(self, entries: Sequence[TokenLogprob], specials: bool = False) -> CompletionLogprobs:
        """The lists for the next tokens of the choice. `specials`: whether special tokens are part
        of the text, as in the echo of a prompt that came as ids."""
        spelt = self._texts.exact if specials else self._texts.raw
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            result.text_offset.append(self._at)
            result.tokens.append(self._texts.spelling(entry.token_id))
            first = math.isnan(entry.logprob)
            result.token_logprobs.append(None if first else finite(entry.logprob))
            result.top_logprobs.append(None if first else self._alternatives(entry))
            raw = spelt(entry.token_id)
            self._at += len(self._decoder.decode(raw))
        return result

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self._texts.spelling(token): finite(logprob) for token, logprob in pairs}
