"""Adding adapters to a batch of mixed rows: those of one adapter lie side by side, so that each is
a slice of the batch, and rows without one are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

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
GATED: Site = attrgetter("gated")
DOWN: Site = attrgetter("down")


def add(parts: Parts, site: Site, x: Tensor, out: Tensor) -> None:
    """out [T, out] += what the adapters make of x [T, in] at one site, in place."""
    for tokens, deltas in parts:
        delta = site(deltas)
        if delta is not None:
            delta.add_to(out[tokens], x[tokens])


def gate(parts: Parts, gated: GatedLinear, x: Tensor) -> Tensor:
    """The gated product of x [T, in]: adapters add to its halves, before the gate. Tokens with
    adapters that lie side by side share one product, which reads the weights once."""
    pieces, done = [], 0
    for run in _runs([part for part in parts if part[1].gated is not None]):
        first, last = run[0][0].start, run[-1][0].stop
        if done < first:
            pieces.append(gated(x[done:first]))
        halves = gated.halves(x[first:last])
        shifted = [(slice(at.start - first, at.stop - first), deltas) for at, deltas in run]
        add(shifted, GATED, x[first:last], halves)
        pieces.append(gated.gate(halves, x.dtype))
        done = last
    if not pieces:
        return gated(x)
    if done < len(x):
        pieces.append(gated(x[done:]))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _runs(parts: Parts) -> list[list[tuple[slice, LayerDeltas]]]:
    """Parts that touch each other, together."""
    runs: list[list[tuple[slice, LayerDeltas]]] = []
    for part in parts:
        if runs and runs[-1][-1][0].stop == part[0].start:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
