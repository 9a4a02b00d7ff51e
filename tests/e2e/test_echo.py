"""`echo` with `logprobs`: the official client, the real gateway, real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from configs.model.card import ModelCard, load_card
from tests.e2e.engines import Pair
from tests.router.gateway.house import KEYS

PROMPT = "the cat sat on the mat and it was still " * 3


@pytest.fixture(scope="module")
def card(tiny_model) -> ModelCard:
    return load_card(tiny_model)


@pytest.fixture
async def pair(card: ModelCard) -> AsyncIterator[Pair]:
    async with Pair(card) as made:
        yield made


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[AsyncOpenAI]:
    url = f"{pair.house.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=KEYS["alice"], max_retries=0, timeout=30) as made:
        yield made


async def ask(client: AsyncOpenAI, prompt: Any, **fields: Any) -> Any:
    settings = {"model": "tiny", "max_tokens": 4, "temperature": 0, "seed": 1, **fields}
    return await client.completions.create(prompt=prompt, echo=True, logprobs=2, **settings)


async def test_P10_a_prompt_that_is_repeated_has_its_logprobs(
    client: AsyncOpenAI, card: ModelCard
) -> None:
    first = (await ask(client, PROMPT)).choices[0]
    again = await ask(client, PROMPT)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert again.choices[0].logprobs == first.logprobs
    found = first.logprobs
    assert "".join(found.tokens) == first.text
    assert first.text.startswith(PROMPT)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])
    assert len(found.tokens) == again.usage.total_tokens
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert first.text[offset : offset + len(token)] == token
    ids = card.tokenizer.encode(PROMPT)
    as_ids = (await ask(client, ids)).choices[0]
    assert as_ids.logprobs == found


async def test_P10_streamed_and_whole_are_the_same_for_several_choices(
    client: AsyncOpenAI,
) -> None:
    prompts, n = [PROMPT, "other words"], 2
    whole = await ask(client, prompts, n=n, temperature=1.0)
    texts, tokens, logprobs = ({i: [] for i in range(4)} for _ in range(3))
    async for chunk in await ask(client, prompts, n=n, temperature=1.0, stream=True):
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                logprobs[choice.index] += choice.logprobs.token_logprobs
    for choice in whole.choices:
        assert "".join(texts[choice.index]) == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
