"""Adding adapters to a batch of mixed rows: those of one adapter lie side by side, so that each is
a slice of the batch, and rows without one are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from replica.lora.weights import AdapterWeights, Delta, LayerDeltas
from replica.models.kernels import GatedLinear


class Span(NamedTuple):
    """Rows of a batch, and their tokens, that compute with `adapter`."""

    rows: slice
    tokens: slice
    adapter: AdapterWeights


Parts = Sequence[tuple[slice, LayerDeltas]]
"""Tokens and what is added to them in one layer: in order, none twice."""

Site = Callable[[LayerDeltas], Delta | None]
QKV: Site = attrgetter("qkv")
OUTPUT: Site = attrgetter("output")
DOWN: Site = attrgetter("down")


def add(parts: Parts, site: Site, x: Tensor, out: Tensor) -> None:
    """out [T, out] += what the adapters make of x [T, in] at one site, in place."""
    for tokens, deltas in parts:
        delta = site(deltas)
        if delta is not None:
            out[tokens] += delta(x[tokens])


def gate(parts: Parts, gated: GatedLinear, x: Tensor) -> Tensor:
    """The gated product of x [T, in]: adapters add to its halves, before the gate."""
    pieces, done = [], 0
    for tokens, deltas in parts:
        if deltas.gated is None:
            continue
        if done < tokens.start:
            pieces.append(gated(x[done : tokens.start]))
        pieces.append(_gate_one(deltas.gated, gated, x[tokens]))
        done = tokens.stop
    if not pieces:
        return gated(x)
    if done < len(x):
        pieces.append(gated(x[done:]))
    return torch.cat(pieces)


def _gate_one(delta: Delta, gated: GatedLinear, x: Tensor) -> Tensor:
    left, right = (gated.halves(x) + delta(x)).chunk(2, dim=-1)
    return (silu(left) * right).to(x.dtype)
