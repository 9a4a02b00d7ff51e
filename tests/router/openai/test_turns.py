"""Generated turns are found by place and text, and only then."""

from __future__ import annotations

import pytest

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.rendering.textcache import TextCache
from router.rendering.turns import Turns

MARKERS = {"<|end|>": 0, "<|head|>": 1, "<|/head|>": 2}
HEADERS = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
BARE = (
    "{% for m in messages %}<|head|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|/head|>{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<|head|>{{ m.content }}<|end|>{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip # noqa: E501


def turns_of(source: str, card: ModelCard) -> tuple[ChatTemplate, Turns]:
    template = ChatTemplate(source, MARKERS)
    return template, Turns(template, card.tokenizer, TextCache(10**6, 10**6))


def conversation(user: str, assistant: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def recalled(turns: Turns, template: ChatTemplate, messages: list[dict]) -> list[int]:
    segments = template.render(messages)
    return [
        index
        for index, segment in enumerate(segments)
        if segment.special_id is None and turns.recall("t", segments, index) is not None
    ]


def test_only_the_assistants_place_counts(card: ModelCard) -> None:
    template, turns = turns_of(HEADERS, card)
    assert turns.remember("t", "the", card.tokenizer.encode("the"))
    segments = template.render(conversation("the", "the"))
    (found,) = recalled(turns, template, conversation("the", "the"))
    assert segments[found - 2].text == "assistant"
    assert turns.recall("t", segments, found) == ("\n\n", b"".join(
        token.to_bytes(4, "little") for token in card.tokenizer.encode("the")
    ))  # fmt: skip


def test_the_text_must_be_equal(card: ModelCard) -> None:
    template, turns = turns_of(HEADERS, card)
    turns.remember("t", "the", card.tokenizer.encode("the"))
    for other in ("the ", "th", "The", "then"):
        expected = 1 if other == "the " else 0  # this template trims
        assert len(recalled(turns, template, conversation("x", other))) == expected


def test_S2_tenants_do_not_share_turns(card: ModelCard) -> None:
    template, turns = turns_of(HEADERS, card)
    turns.remember("other", "the", card.tokenizer.encode("the"))
    assert recalled(turns, template, conversation("x", "the")) == []


@pytest.mark.parametrize("source", [NO_PROMPT, PLAIN])
def test_without_an_opening_marker_nothing_is_remembered(card: ModelCard, source: str) -> None:
    template, turns = turns_of(source, card)
    assert not turns.remember("t", "the", card.tokenizer.encode("the"))
    assert recalled(turns, template, conversation("the", "the")) == []


def test_an_opening_that_ends_with_a_marker(card: ModelCard) -> None:
    template, turns = turns_of(BARE, card)
    assert turns.remember("t", "the", card.tokenizer.encode("the"))
    assert recalled(turns, template, conversation("the", "the")) == []


def test_ids_that_do_not_spell_the_text_are_refused(card: ModelCard) -> None:
    _, turns = turns_of(HEADERS, card)
    ids = card.tokenizer.encode("the end")
    assert not turns.remember("t", "the", ids)  # a stop string cut inside
    assert not turns.remember("t", "the end", [*ids, min(card.tokenizer.special_ids)])
    assert not turns.remember("t", "", [])
    assert turns.remember("t", "the end", ids)
