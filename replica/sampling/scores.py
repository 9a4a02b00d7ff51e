"""Logprobs of tokens that are known: how likely the model found a prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from events.output import TokenLogprob
from replica.sched.plan import Scoring

_AT_ONCE = 64
"""Positions whose logits exist at the same time."""


def score(
    states: Tensor, scoring: Scoring, logits: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprob, ...]:
    """Raw logprobs of each target behind its state; states [targets, hidden], `logits` gives
    float32 [S, vocab] for [S, hidden]. The best alternatives come first."""
    found: list[TokenLogprob] = []
    for start in range(0, len(scoring.targets), _AT_ONCE):
        part = scoring.targets[start : start + _AT_ONCE]
        logprobs = logits(states[start : start + len(part)]).log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(part, device=logprobs.device).unsqueeze(1))
        values, ids = logprobs.topk(scoring.alternatives)
        rows = zip(part, own[:, 0].tolist(), ids.tolist(), values.tolist(), strict=True)
        found += [
            TokenLogprob(token, logprob, tuple(zip(top_ids, top, strict=True)))
            for token, logprob, top_ids, top in rows
        ]
    return tuple(found)
