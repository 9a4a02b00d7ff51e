"""A tiny model's card, and the limits and token texts that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.model.card import ModelCard, load_card
from router.openai.limits import limits_of
from router.openai.logprobs import TokenTexts
from router.openai.schema import Limits
from router.rendering.render import Renderer
from tests.fakes.tiny_model import write_tiny_gguf


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return load_card(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="session")
def limits(card: ModelCard) -> Limits:
    return limits_of(card, ["tiny"])


@pytest.fixture(scope="session")
def texts(card: ModelCard) -> TokenTexts:
    return TokenTexts(card.tokenizer)


@pytest.fixture(scope="session")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def renderer(card: ModelCard, executor: ThreadPoolExecutor) -> Renderer:
    return Renderer(card, executor)
