"""Texts out of block ids: an equal id is an equal text, of as many tokens as a block has."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Texts:
    """Random words, each one token. Blocks are made once and kept."""

    def __init__(self, words: Sequence[str], block_tokens: int, seed: str) -> None:
        self._words = words
        self._block_tokens = block_tokens
        self._seed = seed
        self._made: dict[int, tuple[str, ...]] = {}

    def prompt(self, blocks: Sequence[int], tokens: int) -> str:
        """A text of `tokens` tokens that begins with those blocks. What goes on behind them is
        the last block's, so it is shared by whoever shares that."""
        words: list[str] = []
        for block in blocks[: -(-tokens // self._block_tokens)]:
            words += self._block(block)
        if len(words) < tokens:
            rest = random.Random(f"{self._seed}/rest/{blocks[-1] if blocks else 0}/{tokens}")
            words += rest.choices(self._words, k=tokens - len(words))
        return " ".join(words[:tokens])

    def _block(self, block: int) -> tuple[str, ...]:
        made = self._made.get(block)
        if made is None:
            rng = random.Random(f"{self._seed}/{block}")
            made = tuple(rng.choices(self._words, k=self._block_tokens))
            self._made[block] = made
        return made
