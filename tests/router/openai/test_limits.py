"""Limits that follow from the model."""

from __future__ import annotations

import dataclasses

import pytest

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.limits import limits_of

BLIND = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_CALLS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
PICKY = "{{ raise_exception('no') }}{{ tools }}"


@pytest.mark.parametrize(
    ("source", "tools", "tool_calls"),
    [(BLIND, False, False), (WITH_CALLS, False, True), (PICKY, True, False)],
)
def test_what_the_template_shows(
    card: ModelCard, source: str, tools: bool, tool_calls: bool
) -> None:
    other = dataclasses.replace(card, template=ChatTemplate(source, card.tokenizer.specials))
    limits = limits_of(other, ["a", "b"])
    assert (limits.tools, limits.tool_calls) == (tools, tool_calls)
    assert limits.models == {"a", "b"}


def test_a_smaller_context_than_the_models(card: ModelCard) -> None:
    assert limits_of(card, ["a"]).context_tokens == card.shape.context_tokens
    assert limits_of(card, ["a"], 512).context_tokens == 512
