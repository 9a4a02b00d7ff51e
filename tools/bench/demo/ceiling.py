"""The most that any router could have found cached: one infinite cache with every tenant's past.

The replicas' own rules apply: full blocks only, the last prompt token is always computed, tenants
share nothing but the public head.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.model.card import ModelCard


class CeilingCache:
    """Block-aligned prefixes seen so far, by scope."""

    def __init__(self, card: ModelCard, block_tokens: int) -> None:
        self._card = card
        self._block_tokens = block_tokens
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._public: tuple[int, ...] = ()

    def tokens(self, messages: list[dict[str, str]], answer: bool = True) -> tuple[int, ...]:
        """The prompt's ids as the gateway renders them."""
        segments = self._card.template.render(messages, add_generation_prompt=answer)
        return tuple(self._card.tokenizer.encode_segments(segments))

    def publish(self, messages: list[dict[str, str]]) -> None:
        """Register the public head."""
        self._public = self.tokens(messages, answer=False)

    def _scope(self, tenant: str, prefix: Sequence[int]) -> str:
        public = tuple(prefix) == self._public[: len(prefix)]
        return "" if public else tenant

    def take(self, tenant: str, ids: tuple[int, ...]) -> int:
        """Tokens of `ids` that could be cached now; afterwards all of its full blocks are."""
        step = self._block_tokens
        ends = range(step, len(ids) + 1, step)
        keys = [(self._scope(tenant, ids[:end]), ids[:end]) for end in ends]
        hit = 0
        for key, end in zip(keys, ends, strict=True):
            if key not in self._seen or end >= len(ids):
                break
            hit = end
        self._seen.update(keys)
        return hit
