"""Messages or a bare prompt to token ids, exactly as one tokenisation of the whole would give them.

A rendered conversation is cut at the template's markers. Nothing merges across a marker, so the ids
of each piece can be remembered: a known history costs a look-up, only the new turn is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import Struct

from configs.model.card import ModelCard
from configs.model.errors import TemplateError
from configs.model.segment import Segment
from router.openai import faults
from router.openai.contents import Written
from router.rendering.offload import Offload
from router.rendering.outline import Outline
from router.rendering.pieces import INLINE_CHARS, Pieces
from router.rendering.shelves import Plan, Shelves, plan_of, read, shelves_for
from router.rendering.textcache import TextCache, pack
from router.rendering.tooltext import in_words, needs_words
from router.rendering.turns import Turns
from router.waiting.held import Held

OUTLINES_KEPT = 256
INLINE_TEMPLATE_CHARS = 65_536
"""Up to here the event loop runs the template by itself."""


@dataclass(frozen=True, slots=True)
class RenderBounds:
    """Sizes in bytes are for all tenants together; one tenant gets a quarter of each at most. Of
    segments there are two caches: as they are read, and as JSON writes them.

    `pending_chars` bounds the text that waits for a thread or is in one.
    """

    segment_cache_bytes: int = 64 * 1024 * 1024
    turn_memory_bytes: int = 32 * 1024 * 1024
    pending_chars: int = 64 * 1024 * 1024
    timeout_s: float = 20.0


class RenderedPrompt(Struct, frozen=True):
    """`ids` are u32 little endian; `tokens` is their number."""

    ids: bytes

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // 4


def _cache(max_bytes: int) -> TextCache:
    return TextCache(max_bytes, max_bytes // 4)


def _chars(value: Any) -> int:
    """About how much a template has to read; what is no text counts for a few characters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value)) + sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list) else 8


def _message_chars(message: dict[str, Any]) -> int:
    """The same for a message: its fields have known names."""
    return sum(len(each) if type(each) is str else _chars(each) for each in message.values())


class Renderer:
    """One per model. Its methods belong to the event loop; long texts go to `executor`."""

    def __init__(
        self, card: ModelCard, executor: Executor, bounds: RenderBounds | None = None
    ) -> None:
        bounds = bounds or RenderBounds()
        self._template = card.template
        self._bos = b"" if card.bos_id is None else pack((card.bos_id,))
        self._turns = Turns(card.template, card.tokenizer, _cache(bounds.turn_memory_bytes))
        self._offload = Offload(executor, bounds.pending_chars, bounds.timeout_s)
        # Of written messages and of all others: what is known of one is not asked by the other.
        self.text_limit_bytes = bounds.segment_cache_bytes
        each_bytes = self.text_limit_bytes // 2
        self._known = _cache(each_bytes)
        context_tokens = card.shape.context_tokens
        self._pieces = Pieces(card.tokenizer, context_tokens, self._known, self._offload)
        self._outline = lru_cache(OUTLINES_KEPT)(
            lambda skeleton: Outline(skeleton, card.tokenizer, self._turns)
        )
        self._shelves = shelves_for(
            card.tokenizer, card.template.markers, each_bytes, each_bytes // 4
        )
        self._plan = lru_cache(OUTLINES_KEPT)(self._make_plan)

    @property
    def text_bytes(self) -> int:
        """Of texts whose ids are known, at most `text_limit_bytes`."""
        written = self._shelves.size_bytes if self._shelves is not None else 0
        return self._known.size_bytes + written

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tenant: str,
    ) -> RenderedPrompt:
        """A conversation, ready for its next answer.

        Raises UserError: 400 when the template refuses it or it can't fit the context, 429 and 503
        when too much is waiting.
        """
        if isinstance(messages, Written) and not tools and self._shelves is not None:
            ids = await self._written(messages, self._shelves, tenant)
            if ids is not None:
                return RenderedPrompt(ids)
        messages = messages if isinstance(messages, list) else list(messages)
        outlined = None if tools else self._template.outlined(messages)
        if outlined is not None:
            pieces = self._outline(outlined[0]).pieces(outlined[1], tenant)
        else:
            pieces = self._cut(await self._segments(messages, tools), tenant)
        return RenderedPrompt(await self._pieces.join(pieces, tenant, "messages"))

    async def _written(self, messages: Written, shelves: Shelves, tenant: str) -> bytes | None:
        """The same of messages as they are written; None where they have to be looked at."""
        plan = self._plan(messages.roles)
        if plan is None:
            return None
        turns = self._generated(plan, messages, tenant) if plan.turns else {}
        missing = shelves.join(tenant, plan, messages, turns)
        if not missing:
            return None if missing is None else shelves.ids()
        texts = [read(text) for text in missing]
        chars = sum(map(len, texts))
        self._pieces.check_length(chars, "messages")
        ids = await self._pieces.encode(texts)
        if chars <= INLINE_CHARS:  # nothing else has happened
            return shelves.fill(ids)
        for text, found in zip(missing, ids, strict=True):
            shelves.put(tenant, text, found)
        return None if shelves.join(tenant, plan, messages, turns) else shelves.ids()

    def _generated(self, plan: Plan, messages: Written, tenant: str) -> dict[int, bytes]:
        """The ids of contents that the model has generated, by their numbers."""
        if not self._turns.remembers(tenant):
            return {}
        prefix, known = self._turns.prefix, self._turns.known
        contents = ((number, prefix + messages.content(number)) for number in plan.turns)
        return {
            number: turn[1]
            for number, text in contents
            if (turn := known(tenant, text)) is not None
        }

    def _make_plan(self, roles: tuple[str, ...]) -> Plan | None:
        skeleton = self._template.skeleton(roles)
        return None if skeleton is None else plan_of(self._outline(skeleton), self._turns)

    def _cut(self, segments: list[Segment], tenant: str) -> list[bytes | str]:
        pieces: list[bytes | str] = []
        for index, (text, special_id) in enumerate(segments):
            if special_id is not None:
                pieces.append(pack((special_id,)))
            elif (turn := self._turns.recall(tenant, segments, index)) is not None:
                pieces += turn
            else:
                pieces.append(text)
        return pieces

    async def prompt(self, prompt: str | bytes, *, tenant: str) -> RenderedPrompt:
        """A bare prompt: a text, or token ids as u32 little endian, taken as they are.

        Raises UserError as `chat` does, and 400 for an empty text where the model has no token to
        begin a text with.
        """
        if isinstance(prompt, bytes):
            return RenderedPrompt(prompt)
        if not prompt and not self._bos:
            raise faults.empty_string("prompt")
        return RenderedPrompt(await self._pieces.join([self._bos, prompt], tenant, "prompt"))

    @property
    def pending(self) -> Held:
        """Characters that wait for a thread or are in one."""
        return self._offload.held

    def remember(self, tenant: str, text: str, token_ids: Sequence[int]) -> bool:
        """Keep a turn that the model generated, so that it is rendered with its original ids.

        False, and nothing kept, when the ids don't spell the text exactly.
        """
        return self._turns.remember(tenant, text, token_ids)

    async def _segments(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[Segment]:
        if not self._template.supports_tools and needs_words(messages, tools):
            messages, tools = in_words(messages, tools), None
        chars = sum(map(_message_chars, messages)) + _chars(tools)
        try:
            if chars <= INLINE_TEMPLATE_CHARS:
                return self._template.render(messages, tools)
            return await self._offload.run(chars, lambda _: self._template.render(messages, tools))
        except TemplateError:
            # Its own text is the template's, which may quote a message.
            raise faults.refusal(
                "The model's chat template refuses these messages: "
                "check the order of their roles and that it supports what they hold.",
                param="messages",
                code="invalid_value",
            ) from None
