"""Calls as each family of models writes them, streamed to the official client's accumulator."""

from __future__ import annotations

import dataclasses
import json

import pytest
from openai import AsyncOpenAI
from openai.types.chat.chat_completion import Choice

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.tools.formats import HERMES, LLAMA, MISTRAL, SMOLLM, ToolFormat, format_of
from tests.fakes.scripts import Call
from tests.router.gateway.house import KEYS, House
from tests.router.openai.tools.test_parser import written

TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
TEMPLATES = {
    HERMES: TURNS + "{% if tools %}{{ tools | tojson }} as <tool_call>{...}</tool_call>{% endif %}",
    LLAMA: TURNS
    + '{% if tools %}{{ tools | tojson }} as {"name": .., "parameters": ..}{% endif %}',
    MISTRAL: TURNS + "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}, [TOOL_CALLS]{% endif %}",
    SMOLLM: TURNS,
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "add")]
CALLS = [
    ("look", json.dumps({"a": 'quote " and } ] </tool_call>', "ü": ["日本", {}]})),
    ("add", '{"x": [1.5e3, true]}'),
]


@pytest.mark.parametrize("format_", TEMPLATES, ids=lambda format_: format_.name)
async def test_P7_streamed_calls_of_every_family_accumulate(
    tiny_card: ModelCard, format_: ToolFormat
) -> None:
    template = ChatTemplate(TEMPLATES[format_], tiny_card.tokenizer.specials)
    assert format_of(template.source, template.supports_tools) is format_
    says = "Let me see.\n" if format_.marker else ""
    text = says + written(format_, CALLS)

    async def say(call: Call) -> None:
        piece = call.request.sampling.max_tokens
        for start in range(0, len(text), piece):
            await call.send(text[start : start + piece])
        await call.send(finish="stop")

    card = dataclasses.replace(tiny_card, template=template)
    async with House(card, 1, {}) as house:
        house.script(say)
        url = f"{house.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEYS["alice"], max_retries=0) as client:
            for piece in (1, 5, 1_000):
                check(await streamed(client, piece), says)


async def streamed(client: AsyncOpenAI, piece: int) -> Choice:
    """What the client makes of pieces of so many characters."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": piece}
    async with client.chat.completions.stream(**asked, tools=TOOLS) as stream:
        return (await stream.get_final_completion()).choices[0]


def check(choice: Choice, says: str) -> None:
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "") == says.strip()
    made = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in made] == CALLS
    assert len({call.id for call in made}) == len(CALLS)
