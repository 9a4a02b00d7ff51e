"""What the client is to send: a trace's calls at their times, and the words of its texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import msgspec

from configs.model.card import ModelCard
from tools.bench.demo.load import WORDS
from tools.sim.call import Call, Trace

Arrivals = Literal["trace", "poisson", "constant"]
MIN_WORDS = 32


class Ask(msgspec.Struct, frozen=True):
    """One request: `at_s` from the start; `blocks` as in tools.sim.call.Call."""

    at_s: float
    tenant: str
    blocks: tuple[int, ...]
    text_tokens: int
    max_tokens: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that one process of the client needs; `key` is empty where none is wanted. In turn: one
    request after the other, whatever their times. Texts follow from `seed` and the block ids, so
    that no plan finds in a cache what one with another seed left there."""

    url: str
    key: str
    model: str
    extra: dict[str, Any]
    seed: str
    words: tuple[str, ...]
    block_tokens: int
    asks: tuple[Ask, ...]
    in_turn: bool = False


class Wording(msgspec.Struct, frozen=True):
    """`words` are one token each behind a blank, `overhead_tokens` what the chat template adds."""

    words: tuple[str, ...]
    overhead_tokens: int


def wording(card: ModelCard) -> Wording:
    """By that model's tokenizer and template. Raises ValueError where it knows too few words."""
    encode = card.tokenizer.encode
    words = tuple(word for word in WORDS if len(encode(f" {word}")) == 1)
    if len(words) < MIN_WORDS:
        raise ValueError("the tokenizer knows too few whole words to make texts of exact lengths")
    message = [{"role": "user", "content": words[0]}]
    segments = card.template.render(message, add_generation_prompt=True)
    return Wording(words, len(card.tokenizer.encode_segments(segments)) - len(encode(words[0])))


def shortened(trace: Trace, factor: float, requests: int | None) -> Trace:
    """The first requests, all lengths divided by the factor; what was shared is shared still."""
    block_tokens = max(1, round(trace.block_tokens / factor))
    scale = block_tokens / trace.block_tokens
    calls = tuple(
        replace(
            call,
            prompt_tokens=max(1, round(call.prompt_tokens * scale)),
            output_tokens=max(1, round(call.output_tokens / factor)),
        )
        for call in trace.calls[:requests]
    )
    return Trace(trace.name, block_tokens, calls)


def times(trace: Trace, arrivals: Arrivals, rate: float | None, seed: int) -> list[float]:
    """When each call comes, in s from the first: at the trace's times, stretched to the mean rate
    where one is given, or as that process at that rate."""
    calls = trace.calls
    own = len(calls) / trace.span_s if trace.span_s > 0 else 1.0
    wanted = rate or own
    if arrivals == "trace":
        return [(call.arrival_s - calls[0].arrival_s) * own / wanted for call in calls]
    rng = random.Random(seed)
    gaps = (rng.expovariate(wanted) if arrivals == "poisson" else 1 / wanted for _ in calls[1:])
    return list(accumulate(gaps, initial=0.0))


def asks(calls: Sequence[Call], at_s: Sequence[float], overhead_tokens: int) -> tuple[Ask, ...]:
    """Prompts come to the asked lengths together with the template's own tokens."""
    return tuple(
        Ask(
            at,
            call.tenant,
            tuple(call.blocks.tolist()),
            max(1, call.prompt_tokens - overhead_tokens),
            max(1, call.output_tokens),
        )
        for call, at in zip(calls, at_s, strict=True)
    )
