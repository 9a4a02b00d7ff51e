"""Where one child stands in its grammar.

Used by one thread at a time: whoever compiles it, then the engine. It advances at commit alone, so
what a plan in flight, a preemption or an abort leaves behind has nothing to be undone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher


class GrammarState:
    """One child's place; made by the compiler."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def failed(self) -> bool:
        """The library gave up: the grammar costs more than its limits at this place."""
        return bool(self._matcher.is_error())

    @property
    def finished(self) -> bool:
        """The answer is whole and can't go on."""
        return bool(self._matcher.is_stopped()) and not self.failed

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Follow tokens that are certain. False when they don't fit, and then it has failed."""
        return bool(self._matcher.consume_tokens(list(token_ids)))

    def fill(self, words: np.ndarray) -> None:
        """One bit for each token that may come next into int32 [ceil(vocab / 32)], contiguous, the
        lowest bit of a word first. All zero when it has failed."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.failed:
            words[:] = 0
