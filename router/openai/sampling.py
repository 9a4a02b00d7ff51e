"""From what the client said to what the engine does: final sampling parameters."""

from __future__ import annotations

from collections.abc import Callable

from events.request import SamplingParams
from router.openai import faults
from router.openai.badwords import Encode, spellings
from router.openai.schema import ChatRequest, CompletionRequest

COMPLETION_DEFAULT_TOKENS = 16
"""What /v1/completions generates when `max_tokens` is absent, as OpenAI documents it."""

_SEEDS = 2**62
"""Seeds are folded below this, so that seed + child fits a signed 64-bit integer."""


def _answer_tokens(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, context_tokens: int
) -> int:
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    room = context_tokens - prompt_tokens
    if room < 1:
        raise faults.prompt_too_long(param, context_tokens, prompt_tokens)
    wanted = request.controls.max_tokens
    if wanted is None:
        return room if param == "messages" else min(room, COMPLETION_DEFAULT_TOKENS)
    if wanted > room:
        raise faults.answer_too_long(param, context_tokens, prompt_tokens, wanted)
    return wanted


def _prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """Those of a prompt that is repeated."""
    echoed = isinstance(request, CompletionRequest) and request.echo
    return request.controls.logprobs if echoed else None


def to_sampling(
    request: ChatRequest | CompletionRequest,
    prompt_tokens: int,
    context_tokens: int,
    mint_seed: Callable[[], int],
    encode: Encode | None = None,
) -> SamplingParams:
    """Parameters for one prompt of `request`. `encode`: only words that are barred need it.

    Raises UserError (context_length_exceeded) when prompt and answer don't fit the context.
    """
    said = request.controls
    max_tokens = _answer_tokens(request, prompt_tokens, context_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=(mint_seed() if said.seed is None else said.seed) % _SEEDS,
        n=said.answers,
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        min_p=said.min_p,
        presence_penalty=said.presence_penalty,
        frequency_penalty=said.frequency_penalty,
        repetition_penalty=said.repetition_penalty,
        logit_bias=said.logit_bias,
        logprobs=0 if said.ranked and said.logprobs is None else said.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        min_tokens=min(said.min_tokens, max_tokens),
        stop=said.stop,
        stop_token_ids=said.stop_token_ids,
        ignore_eos=said.ignore_eos,
        grammar=said.grammar,
        bad_words=spellings(said.bad_words, encode) if said.bad_words and encode else (),
    )
