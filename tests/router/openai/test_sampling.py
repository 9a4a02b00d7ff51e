"""From what the client said to the engine's parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from configs.model.card import ModelCard
from events.errors import UserError
from events.request import SamplingParams
from router.openai.badwords import spellings
from router.openai.parse import parse_chat
from router.openai.sampling import to_sampling
from router.openai.schema import ChatRequest, CompletionRequest, Controls, Limits
from tests.router.openai.bodies import USER, chat_body


def chat(**controls: object) -> ChatRequest:
    return ChatRequest("tiny", [USER], Controls(**controls))


def completion(**controls: object) -> CompletionRequest:
    return CompletionRequest("tiny", ("hi",), Controls(**controls))


def mint() -> int:
    return 77


def test_everything_said_arrives() -> None:
    controls = Controls(
        max_tokens=5, seed=3, n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
        presence_penalty=0.2, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={1: 2.0},
        logprobs=4, min_tokens=2, stop=("x",), stop_token_ids=(9,), ignore_eos=True,
    )  # fmt: skip
    sampling = to_sampling(ChatRequest("tiny", [USER], controls), 10, 100, mint)
    said = structs.asdict(controls)
    assert said.pop("best_of") is None
    assert sampling == SamplingParams(**said)


@pytest.mark.parametrize(
    ("said", "n", "logprobs"),
    [
        ({"n": 2, "best_of": 5}, 5, 0),
        ({"n": 2, "best_of": 5, "logprobs": 3}, 5, 3),
        ({"n": 2, "best_of": 2}, 2, None),
    ],
)
def test_answers_that_are_ranked_come_with_logprobs(
    said: dict[str, int], n: int, logprobs: int | None
) -> None:
    request = CompletionRequest("tiny", ("x",), Controls(max_tokens=5, **said))
    sampling = to_sampling(request, 10, 100, mint)
    assert (sampling.n, sampling.logprobs) == (n, logprobs)


def test_a_chat_may_fill_the_context_and_a_completion_makes_16_tokens() -> None:
    assert to_sampling(chat(), 10, 100, mint).max_tokens == 90
    assert to_sampling(completion(), 10, 100, mint).max_tokens == 16
    assert to_sampling(completion(), 95, 100, mint).max_tokens == 5


def test_the_seed_is_minted_where_the_client_gave_none() -> None:
    assert to_sampling(chat(), 1, 100, mint).seed == 77
    assert to_sampling(chat(seed=0), 1, 100, mint).seed == 0


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_every_seed_leaves_room_for_its_children(seed: int) -> None:
    found = to_sampling(chat(seed=seed), 1, 100, mint).seed
    assert 0 <= found < 2**63 - 8


def test_min_tokens_never_exceed_what_fits() -> None:
    assert to_sampling(chat(min_tokens=50), 90, 100, mint).min_tokens == 10


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(99, None, True), (99, 1, True), (50, 50, True), (50, 51, False), (100, None, False),
     (100, 1, False), (5_000, None, False)],
)  # fmt: skip
def test_the_context_is_kept(
    make: object, prompt_tokens: int, max_tokens: int | None, fits: bool
) -> None:
    if fits:
        to_sampling(make(max_tokens=max_tokens), prompt_tokens, 100, mint)
        return
    with pytest.raises(UserError) as caught:
        to_sampling(make(max_tokens=max_tokens), prompt_tokens, 100, mint)
    error = caught.value.error
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == ("messages" if make is chat else "prompt")
    assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")


def test_wording_of_too_long_an_answer() -> None:
    with pytest.raises(UserError, match=r"you requested 120 tokens \(20 in the messages, 100 in"):
        to_sampling(chat(max_tokens=100), 20, 100, mint)


def test_P10_logprobs_reach_the_engine(limits: Limits) -> None:
    request = parse_chat(chat_body(logprobs=True, top_logprobs=3), limits)
    assert to_sampling(request, 1, 100, mint).logprobs == 3


def test_bad_words_are_spelt_with_and_without_a_blank(card: ModelCard) -> None:
    encode = card.tokenizer.encode
    found = spellings(["the", "  Xy"], encode)
    assert found == (tuple(encode("the")), tuple(encode(" the")), tuple(encode("Xy")))
    sampling = to_sampling(chat(bad_words=("the",)), 1, 100, mint, encode)
    assert sampling.bad_words == found[:2]
