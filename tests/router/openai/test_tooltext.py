"""Tools for a template that knows nothing of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.parse import parse_chat
from router.openai.schema import Limits
from router.rendering.render import Renderer
from router.rendering.tooltext import in_words
from tests.router.openai.bodies import USER, chat_body

BLIND = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "é", "parameters": {}}}
CALLS = [
    {"id": str(x), "type": "function", "function": {"name": "look", "arguments": f'{{"x":{x}}}'}}
    for x in (1, 2)
]
ANSWER = '<tool_call>[{"name": "look", "arguments": {"x": 1}}, ' \
    '{"name": "look", "arguments": {"x": 2}}]</tool_call>'  # fmt: skip


def history(text: str = "") -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in CALLS
    ]
    return [USER, {"role": "assistant", "content": text, "tool_calls": CALLS}, *results, USER]


def test_calls_and_results_become_turns() -> None:
    found = in_words(history("Well."), [TOOL])
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user", "user"]
    assert '<tools>[{"name": "look", "description": "é", "parameters": {}}]' in found[0]["content"]
    assert found[2] == {"role": "assistant", "content": f"Well.\n{ANSWER}"}
    response = "<tool_response>\n{}\n</tool_response>"
    assert found[3]["content"] == f"{response.format(1)}\n{response.format(2)}"


def test_tools_join_the_system_prompt_that_there_is() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = in_words([system, USER], [TOOL])
    assert found[0]["content"].startswith("Be brief.\n\nYou are an expert")
    assert system["content"] == "Be brief."
    assert in_words([system, USER], None) == [system, USER]


@pytest.fixture
def renderer(card: ModelCard) -> Iterator[Renderer]:
    template = ChatTemplate(BLIND, card.tokenizer.specials)
    with ThreadPoolExecutor(1) as pool:
        yield Renderer(dataclasses.replace(card, template=template), pool)


async def test_a_turn_that_was_generated_is_rendered_with_its_own_ids(
    card: ModelCard, renderer: Renderer, limits: Limits
) -> None:
    """What the grammar makes the model write is what the next turn's prompt says."""
    odd = [token for letter in ANSWER for token in card.tokenizer.encode(letter)]
    assert odd != card.tokenizer.encode(ANSWER)
    assert renderer.remember("t", ANSWER, odd)
    asked = parse_chat(chat_body(messages=history(), tools=[TOOL]), limits)
    rendered = await renderer.chat(asked.messages, asked.tools, tenant="t")
    wanted = b"".join(token.to_bytes(4, "little") for token in odd)
    assert wanted in rendered.ids
