"""Turns that the model generated, found again in the next request and given their original ids.

Retokenising an answer may give other ids than the model sampled; then the next turn of a
conversation would miss the cache from there on. A turn is known by its place (right after the
template's own opening of an answer) and by its exact text, never by what a user wrote elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.model.errors import TemplateError
from configs.model.segment import Segment
from configs.model.template import ChatTemplate
from configs.model.tokenizer import Tokenizer
from router.rendering.textcache import TextCache, pack

_PROBE = [{"role": "user", "content": "x"}]


def _opening(template: ChatTemplate) -> list[Segment]:
    """What the generation prompt adds, from its first marker on; empty where it has none."""
    try:
        without = template.render(_PROBE, add_generation_prompt=False)
        with_it = template.render(_PROBE, add_generation_prompt=True)
    except TemplateError:
        return []
    at = 0
    while at < len(without) and without[at] == with_it[at]:
        at += 1
    added = with_it[at:]
    while added and added[0].special_id is None:
        del added[0]
    return added


class Turns:
    """Per tenant, bounded. Event loop only. `prefix`: what the template writes between the marker
    that opens an answer and the answer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, memory: TextCache) -> None:
        opening = _opening(template)
        plain_end = bool(opening) and opening[-1].special_id is None
        self._before = opening[:-1] if plain_end else opening
        self.prefix = opening[-1].text if plain_end else ""
        self._tokenizer = tokenizer
        self._memory = memory

    def remember(self, tenant: str, text: str, token_ids: Sequence[int]) -> bool:
        """Keep a generated turn. False when it can't be used: its ids don't spell its text exactly
        (a stop string cut inside a token), or one of them is a special token."""
        usable = (
            bool(text and self._before)
            and self._tokenizer.special_ids.isdisjoint(token_ids)
            and self._tokenizer.decode(token_ids) == text
        )
        if usable:
            self._memory.put(tenant, text, pack(token_ids))
        return usable

    def recall(
        self, tenant: str, segments: Sequence[Segment], index: int
    ) -> tuple[str, bytes] | None:
        """For the plain segment at `index`, if it is a known turn: the template's text before it,
        and the turn's ids."""
        text = segments[index].text
        if not text.startswith(self.prefix) or not self.opens(segments[:index]):
            return None
        return self.known(tenant, text)

    def opens(self, before: Sequence[Segment | None]) -> bool:
        """Whether a turn may stand behind these segments."""
        return bool(self._before) and list(before[-len(self._before) :]) == self._before

    def remembers(self, tenant: str) -> bool:
        """Whether any turn of this tenant is known."""
        return bool(self._memory.texts_of(tenant))

    def known(self, tenant: str, text: str) -> tuple[str, bytes] | None:
        """As `recall`, of a text where a turn may stand."""
        if not text.startswith(self.prefix):
            return None
        ids = self._memory.get(tenant, text[len(self.prefix) :])
        return None if ids is None else (self.prefix, ids)
