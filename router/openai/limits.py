"""The limits that follow from a model: what its template can show, how long its context is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from configs.model.card import ModelCard
from configs.model.errors import TemplateError
from configs.model.template import ChatTemplate
from router.openai.schema import Limits
from router.openai.tools.formats import format_of

_CALL = {"id": "call", "type": "function", "function": {"name": "probe", "arguments": "{}"}}


@lru_cache(maxsize=8)
def _shows_tool_calls(template: ChatTemplate) -> bool:
    """Whether a past call makes any difference to what the model reads; tried once per template."""
    user = {"role": "user", "content": "x"}
    plain = {"role": "assistant", "content": ""}
    try:
        with_call = template.render([user, plain | {"tool_calls": [_CALL]}])
        return with_call != template.render([user, plain])
    except TemplateError:
        return False


def limits_of(card: ModelCard, models: Iterable[str], context_tokens: int | None = None) -> Limits:
    """Limits for the served names `models`. `context_tokens`: where it is less than the model's."""
    template = card.template
    return Limits(
        models=frozenset(models),
        context_tokens=context_tokens or card.shape.context_tokens,
        vocab=card.tokenizer.vocab_size,
        # A template that knows nothing of tools gets both as text, see `router.rendering.tooltext`.
        tool_calls=not template.supports_tools or _shows_tool_calls(template),
        tool_format=format_of(template.source, template.supports_tools),
    )
