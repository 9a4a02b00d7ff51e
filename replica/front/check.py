"""Whether a request can be served here at all. Refusals never quote the request.

The gateway has validated what clients may ask; the replica trusts nothing that came over a socket,
since one bad number would harm the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from events.errors import CoreError, UserError
from events.grammar import MAX_GRAMMAR_BYTES
from events.request import ChildProgress, CoreRequest, SamplingParams

MAX_CHILDREN = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1_024
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 512
MAX_BAD_WORD_IDS = 16_384
MAX_ID_CHARACTERS = 256
MAX_WEIGHT = 1_000.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica serves. `model` is the name that requests must carry; `adapters`: content
    digests of its LoRA adapters, by name."""

    model: str
    vocab_size: int
    context_tokens: int
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ids:
    """A request's token ids. `outputs`: what each child has put out elsewhere, None for one that
    has finished."""

    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, ...] | None, ...]


def refuse(
    message: str, code: str = "invalid_value", param: str | None = None, status: int = 400
) -> NoReturn:
    """Raise the caller's mistake as a UserError."""
    raise UserError(CoreError(status=status, message=message, code=code, param=param))


def check_request(request: CoreRequest, limits: Limits) -> Ids:
    """Its token ids. Raises UserError."""
    if request.model != limits.model:
        refuse("The model is not served here.", "model_not_found", "model", 404)
    if request.adapter is not None and request.adapter not in limits.adapters.items():
        refuse("The adapter is not served here.", "model_not_found", "model", 404)
    names = (request.request_id, request.trace_id, request.tenant, request.router_boot)
    longest = max(map(len, names))
    if longest > MAX_ID_CHARACTERS or request.attempt < 0:
        refuse("The request's ids are out of range.")
    for deadline_ms in (request.ttft_deadline_ms, request.itl_deadline_ms, request.e2e_deadline_ms):
        if deadline_ms is not None and not 0 < deadline_ms < math.inf:
            refuse("A deadline must be a positive number of milliseconds.")
    _within("weight", request.weight, 0.01, MAX_WEIGHT)
    _within("warm_share", request.warm_share, 0.0, 1.0)
    prompt = _check_ids(request, limits.vocab_size, "prompt")
    check_sampling(request.sampling, limits.vocab_size)
    if not prompt:
        refuse("The prompt is empty.", "empty_prompt", "prompt")
    _check_length(len(prompt), request.sampling.max_tokens, limits.context_tokens)
    _check_write(request)
    return Ids(prompt, _check_progress(request, limits.vocab_size))


def _check_write(request: CoreRequest) -> None:
    """Blocks alone: whatever would shape an answer has no place here."""
    params = request.sampling
    answers = params.max_tokens > 1 or params.n > 1 or params.prompt_logprobs is not None
    if len(request.write_to) > MAX_ID_CHARACTERS or (
        request.write_to and (answers or request.progress or params.grammar is not None)
    ):
        refuse("Nothing can be answered beside 'write_to'.", param="write_to")


def _check_progress(request: CoreRequest, vocab_size: int) -> tuple[tuple[int, ...] | None, ...]:
    params, progress = request.sampling, request.progress
    if not progress:
        return ((),) * params.n
    if len(progress) != params.n or all(child.finished for child in progress):
        refuse("The progress is not that of the request's children.", param="progress")
    return tuple(
        None if child.finished else _check_output(child, params.max_tokens, vocab_size)
        for child in progress
    )


def _check_output(child: ChildProgress, max_tokens: int, vocab_size: int) -> tuple[int, ...]:
    if len(child.output) >= 4 * max_tokens:
        refuse("Nothing is left to be generated.", param="progress")
    return _check_ids(child, vocab_size, "progress")


def _check_ids(holder: CoreRequest | ChildProgress, vocab_size: int, param: str) -> tuple[int, ...]:
    try:
        ids = holder.token_ids()
    except ValueError:
        refuse(f"The {param} is not a sequence of 32-bit token ids.", param=param)
    if len(ids) and int(np.max(ids)) >= vocab_size:
        refuse(f"The {param} holds an id that is no token.", "invalid_token", param)
    return tuple(ids.tolist())


def _check_length(prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
    if prompt_tokens + max_tokens > context_tokens:
        refuse(
            f"The model's context is {context_tokens} tokens; {prompt_tokens} in the prompt and "
            f"{max_tokens} to be generated are more.",
            "context_length_exceeded",
            "messages",
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Every number in its range. Raises UserError."""
    _within("n", params.n, 1, MAX_CHILDREN)
    _within("max_tokens", params.max_tokens, 1, 2**31)
    _within("min_tokens", params.min_tokens, 0, params.max_tokens)
    _within("temperature", params.temperature, 0.0, 100.0)
    _within("top_p", params.top_p, 0.0, 1.0)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("top_k", params.top_k, 0, 2**31)
    _within("presence_penalty", params.presence_penalty, -10.0, 10.0)
    _within("frequency_penalty", params.frequency_penalty, -10.0, 10.0)
    _within("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    if params.logprobs is not None:
        _within("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _within("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    if params.grammar is not None and len(params.grammar.source) > MAX_GRAMMAR_BYTES:
        refuse("The grammar is too large.", param=params.grammar.param)
    _check_stops(params, vocab_size)
    _check_biases(params, vocab_size)
    _check_bad_words(params.bad_words, vocab_size)


def _within(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN is refused too.
    if not low <= value <= high:
        refuse(f"'{name}' must lie between {low} and {high}.", param=name)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOPS:
        refuse(f"At most {MAX_STOPS} stop strings are allowed.", param="stop")
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in params.stop):
        refuse(f"A stop string has 1 to {MAX_STOP_CHARACTERS} characters.", param="stop")
    ids = params.stop_token_ids
    if len(ids) > MAX_STOP_TOKEN_IDS or not all(0 <= token < vocab_size for token in ids):
        refuse("The stop token ids are out of range.", param="stop_token_ids")


def _check_bad_words(words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    ids = [token for word in words for token in word]
    if len(words) > MAX_BAD_WORDS or len(ids) > MAX_BAD_WORD_IDS or not all(words):
        refuse("'bad_words' holds too many words or an empty one.", param="bad_words")
    if not all(0 <= token < vocab_size for token in ids):
        refuse("'bad_words' holds an id that is no token.", param="bad_words")


def _check_biases(params: SamplingParams, vocab_size: int) -> None:
    biases = params.logit_bias
    if len(biases) > MAX_BIASES or not all(0 <= token < vocab_size for token in biases):
        refuse("'logit_bias' holds too many ids or one that is no token.", param="logit_bias")
    for bias in biases.values():
        _within("logit_bias", bias, -100.0, 100.0)
