"""Limits that follow from the model."""

from __future__ import annotations

import dataclasses

import pytest

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.limits import limits_of
from router.openai.tools.formats import HERMES, LLAMA, MISTRAL, SMOLLM, ToolFormat

BLIND = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_CALLS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
PICKY = "{{ raise_exception('no') }}{{ tools }}"


@pytest.mark.parametrize(
    ("source", "format_", "tool_calls"),
    [
        (BLIND, SMOLLM, True),
        (WITH_CALLS, SMOLLM, True),
        (PICKY, HERMES, False),
        ("{{ tools }}<tool_call>{{ messages }}", HERMES, True),
        ("{{ tools }}[TOOL_CALLS]{{ messages }}", MISTRAL, True),
        ("""{{ tools }}{"name": f, "parameters": p}{{ messages }}""", LLAMA, True),
    ],
)
def test_what_the_template_shows(
    card: ModelCard, source: str, format_: ToolFormat, tool_calls: bool
) -> None:
    other = dataclasses.replace(card, template=ChatTemplate(source, card.tokenizer.specials))
    limits = limits_of(other, ["a", "b"])
    assert (limits.tool_format, limits.tool_calls) == (format_, tool_calls)
    assert limits.models == {"a", "b"}


def test_a_smaller_context_than_the_models(card: ModelCard) -> None:
    assert limits_of(card, ["a"]).context_tokens == card.shape.context_tokens
    assert limits_of(card, ["a"], 512).context_tokens == 512
