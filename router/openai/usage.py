"""Token counts of a whole reply, as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from events.output import Usage


class PromptDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` were not computed for this request."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Kinds of tokens that this server never makes; clients expect the names."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    """`usage` of a body or of the last chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails()


def total(choices: Sequence[Usage | None], n: int) -> UsageBody:
    """Sum over choices: `choices[p * n + i]` is choice i of prompt p, None if it never reported.

    A prompt counts once. Its cached tokens are those of the choice that found least: the others may
    have found what that one computed.
    """
    if len(choices) == 1 and (only := choices[0]) is not None:
        return _body(only.prompt_tokens, only.cached_tokens, only.completion_tokens)
    prompt = cached = completion = 0
    for start in range(0, len(choices), n):
        group = [usage for usage in choices[start : start + n] if usage is not None]
        if group:
            prompt += group[0].prompt_tokens
            cached += min(usage.cached_tokens for usage in group)
            completion += sum(usage.completion_tokens for usage in group)
    return _body(prompt, cached, completion)


def _body(prompt: int, cached: int, completion: int) -> UsageBody:
    return UsageBody(prompt, completion, prompt + completion, PromptDetails(cached))
