"""The chain from logits to the distribution that is drawn from: temperature and truncations.

All of it works row by row along the vocabulary, so that a row never depends on its neighbours.
Ids that tie with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from events.request import SamplingParams

_NUCLEUS_WIDTH = 1024
"""How many of the best ids top-p looks at first; it widens the look where that's too few."""


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights to draw by, [rows, vocab], not normalised; zero means can't be drawn.

    logits are float32 [rows, vocab]; every row has a temperature above zero as a float32.
    """
    scaled = _tempered(logits, params)
    scaled = _min_p(scaled, params)
    scaled = _top_k(scaled, params)
    return _top_p(scaled.softmax(-1), params)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Shifted so that the best logit is zero: no temperature can make it overflow."""
    shifted = logits - logits.amax(-1, keepdim=True)
    if all(each.temperature == 1.0 for each in params):
        return shifted
    return shifted / _column([each.temperature for each in params], logits)


def _min_p(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Drop ids less likely than min_p times the likeliest, whose logit is zero."""
    if not any(each.min_p > 0.0 for each in params):
        return scaled
    floor = _column([each.min_p for each in params], scaled).log()
    return scaled.masked_fill(scaled < floor, float("-inf"))


def _top_k(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab = scaled.shape[-1]
    ks = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    if not any(ks):
        return scaled
    best = scaled.topk(max(ks), dim=-1).values
    last = torch.tensor([max(k - 1, 0) for k in ks], device=scaled.device).unsqueeze(1)
    off = torch.tensor([k == 0 for k in ks], device=scaled.device).unsqueeze(1)
    floor = best.gather(1, last).masked_fill(off, float("-inf"))
    return scaled.masked_fill(scaled < floor, float("-inf"))


def _top_p(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Keep the likeliest ids up to the first that brings their sum to top_p."""
    rows = [row for row, each in enumerate(params) if each.top_p < 1.0]
    if not rows:
        return weights
    index = torch.tensor(rows, device=weights.device)
    chosen = weights[index]
    top_p = _column([params[row].top_p for row in rows], chosen.double())
    floor = _nucleus_floor(chosen, top_p)
    return weights.index_copy(0, index, chosen.masked_fill(chosen < floor, 0.0))


def _nucleus_floor(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weight of the last id that top-p keeps, [rows, 1]."""
    vocab = weights.shape[-1]
    width = min(_NUCLEUS_WIDTH, vocab)
    while True:
        best = weights.topk(width, dim=-1).values
        mass = best.double().cumsum(-1)
        if width == vocab or bool((mass[:, -1:] >= top_p).all()):
            break
        width = min(width * 8, vocab)
    kept = (mass < top_p).sum(-1, keepdim=True).clamp(max=width - 1)
    return best.gather(1, kept)
