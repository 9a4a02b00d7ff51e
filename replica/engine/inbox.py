"""The engine's inbox: words from any thread, carried out on the engine thread, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from threading import Condition
from typing import NamedTuple


class Word(NamedTuple):
    """`command` runs on the engine thread. `tokens`: prompt tokens that it carries. `reply` is
    what its sender waits for: the command sets it, and it gets 0 when the command never runs.
    """

    command: Callable[[], None]
    tokens: int = 0
    reply: Future[int] | None = None


class Posted(Enum):
    """What became of a word."""

    TAKEN = auto()
    FULL = auto()
    SHUT = auto()


class Inbox:
    """Bounded in prompt tokens: `max_tokens` and one request more."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._words: deque[Word] = deque()
        self._changed = Condition()
        self._stopping = self._shut = False

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @property
    def shut_down(self) -> bool:
        """Whether `shut` was called."""
        return self._shut

    def post(self, word: Word) -> Posted:
        """Leave word and wake the engine."""
        with self._changed:
            if self._shut:
                return Posted.SHUT
            if word.tokens and self._tokens > self._max_tokens:
                return Posted.FULL
            self._tokens += word.tokens
            self._words.append(word)
            self._changed.notify()
            return Posted.TAKEN

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is word, or `stop`, or the time is over."""
        with self._changed:
            if not self._words and not self._stopping:
                self._changed.wait(timeout_s)

    def carry_out(self) -> None:
        """Run all commands that are here."""
        while (word := self._take()) is not None:
            try:
                word.command()
            finally:
                _answer(word)

    def stop(self) -> None:
        """Ask the engine thread to stop; words are still taken."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def shut(self) -> None:
        """From now on no word is taken; what is here is dropped."""
        with self._changed:
            self._stopping = self._shut = True
            words, self._words = self._words, deque()
            self._tokens = 0
            self._changed.notify()
        for word in words:
            _answer(word)

    def _take(self) -> Word | None:
        with self._changed:
            if not self._words:
                return None
            word = self._words.popleft()
            self._tokens -= word.tokens
            return word


def _answer(word: Word) -> None:
    if word.reply is not None and not word.reply.done():
        word.reply.set_result(0)
