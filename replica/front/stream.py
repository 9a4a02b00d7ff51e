"""One child's tokens as pieces in which text, ids and logprobs are always cut together.

Tokens go through one at a time, so any split of the ids into engine steps gives the same text, ids,
logprobs and end. A token is released once all its characters are decided and none of them could
begin a stop string; what was released is never taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from events.output import TokenLogprob
from replica.front.detokenise import Detokeniser, Vocabulary
from replica.front.stops import StopFinder


class Piece(NamedTuple):
    """New output; `logprobs` is empty or parallel to `token_ids`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class _Held(NamedTuple):
    """A token that covers the characters [start, end) of the child's text."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int


class TokenStream:
    """Detokenises, finds stop strings, holds back, cuts. `min_tokens` tokens can't stop it."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], min_tokens: int = 0) -> None:
        self.stopped_by: str | None = None
        self.tokens = 0
        self._detokeniser = Detokeniser(vocabulary)
        self._finder = StopFinder(stops)
        self._min_tokens = min_tokens
        self._held: deque[_Held] = deque()
        self._text = ""  # decided and not yet released
        self._released = 0  # characters released so far
        self._safe = 0  # characters that no stop string can reach any more
        self._ahead = 0  # characters behind the released ones that were given out elsewhere

    @property
    def _decided(self) -> int:
        return self._released + len(self._text)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> bool:
        """Take one token in; False when a stop string has ended the child at or before it."""
        if self.stopped_by is not None:
            return False
        start = self._decided
        text = self._detokeniser.push(token_id)
        self.tokens += 1
        end = start + len(text) + self._detokeniser.undecided
        self._held.append(_Held(token_id, logprob, start, end))
        return self._grow(text)

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Follow tokens that another stream has released; only what comes behind them is given out.

        False when they go beyond the child's end. Their text includes a last character that the
        next token is yet to decide: it was decided there, and must not be said twice."""
        if not all(self.push(token_id) for token_id in token_ids):
            return False
        self._held.clear()
        self._released, self._text = self._decided, ""
        self._ahead = int(self._detokeniser.undecided)
        return True

    def end_with(self, token_id: int) -> None:
        """Count the token that ended the child; it belongs to no text and is not shown."""
        if self.stopped_by is None:
            self.tokens += 1

    def take(self) -> Piece:
        """What may be shown now."""
        return self._release(self._safe)

    def finish(self) -> Piece:
        """The rest; nothing may be pushed after it."""
        if self.stopped_by is None:
            self._grow(self._detokeniser.flush())
        return self._release(None)

    def _grow(self, text: str) -> bool:
        before = self._decided
        hit = self._finder.push(text, armed=self.tokens > self._min_tokens)
        self._text += text
        if hit is None:
            self._safe = self._decided - self._finder.held
        else:
            self.stopped_by = hit.stop
            self._cut(before + hit.end - len(hit.stop))
        return hit is None

    def _cut(self, end: int) -> None:
        """The text ends at character `end`; a token that starts there or later is dropped.

        A token without text that was safe before stays: another cut into steps had released it.
        """
        self._text = self._text[: max(0, end - self._released)]
        while self._held and self._held[-1].start >= end and self._held[-1].end > self._safe:
            self._held.pop()

    def _release(self, safe: int | None) -> Piece:
        """Tokens that end at or before character `safe`, with their text; None releases all."""
        tokens: list[_Held] = []
        while self._held and (safe is None or self._held[0].end <= safe):
            tokens.append(self._held.popleft())
        if safe is None:
            length = len(self._text)
        else:
            length = tokens[-1].end - self._released if tokens else 0
        text, self._text = self._text[:length], self._text[length:]
        self._released += len(text)
        said, self._ahead = min(len(text), self._ahead), max(0, self._ahead - len(text))
        return Piece(
            text[said:],
            tuple(token.token_id for token in tokens),
            tuple(token.logprob for token in tokens if token.logprob is not None),
        )
