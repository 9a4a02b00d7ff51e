"""Adding adapters to a batch of mixed rows: those of one adapter lie side by side, so that each is
a slice of the batch, and rows without one are not touched.

Where the kernels can, all adapters of a batch are one call beside each product of the model, as in
Punica (Chen et al. 2023) and S-LoRA (Sheng et al. 2023); else they are added one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from replica.lora.weights import AdapterWeights
from replica.models.kernels import AddThin, GatedLinear, Kernels, ThinParts

QKV, OUTPUT, GATED, DOWN = range(4)
"""In the order of SITES."""

FEW_TOKENS = 64
"""Up to here the weights of a product are most of its cost, so that it is made once for all rows,
also where only some of them need its two halves."""


class Span(NamedTuple):
    """Rows of a batch, and their tokens, that compute with `adapter`."""

    rows: slice
    tokens: slice
    adapter: AdapterWeights


class Additions:
    """What the adapters of a batch add to the products of each layer, one by one. `spans` are in
    order, none twice; without any this does nothing."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def of(self, spans: Sequence[Span]) -> Additions:
        """The same adapters beside other rows."""
        return Additions(spans)

    def last_only(self) -> Additions:
        """For a batch in which each row is reduced to its last token."""
        return self.of([span._replace(tokens=span.rows) for span in self._spans])

    @property
    def tokens(self) -> slice:
        """From the first of an adapter to the last."""
        return slice(self._spans[0].tokens.start, self._spans[-1].tokens.stop)

    @cached_property
    def inside(self) -> Additions:
        """For those `tokens` alone."""
        first = self.tokens.start
        at = [slice(span.tokens.start - first, span.tokens.stop - first) for span in self._spans]
        return self.of([s._replace(tokens=t) for s, t in zip(self._spans, at, strict=True)])

    def adds(self, layer: int, site: int) -> bool:
        """Whether one of them adds anything there."""
        return any(span.adapter.layers[layer][site] is not None for span in self._spans)

    def add(self, layer: int, site: int, x: Tensor, out: Tensor) -> None:
        """out [T, out] += what they make of x [T, in] at one site, in place."""
        for span in self._spans:
            delta = span.adapter.layers[layer][site]
            if delta is not None:
                delta.add_to(out[span.tokens], x[span.tokens])


class _Together(Additions):
    """All of them in one call. `pairs`: int64 [layers, SITES, spans, 3]."""

    def __init__(self, spans: Sequence[Span], pairs: np.ndarray, add_thin: AddThin) -> None:
        super().__init__(spans)
        self._add_thin = add_thin
        self._rows = np.array([(at.start, at.stop) for _, at, _ in spans], np.int64)
        self._pairs = pairs
        self._adds: list[list[bool]] = pairs[..., 2].any(-1).tolist()
        self._begin, self._strides = pairs.ctypes.data, pairs.strides

    def of(self, spans: Sequence[Span]) -> Additions:
        return _Together(spans, self._pairs, self._add_thin)

    def adds(self, layer: int, site: int) -> bool:
        return self._adds[layer][site]

    def add(self, layer: int, site: int, x: Tensor, out: Tensor) -> None:
        if self._adds[layer][site]:
            at = self._begin + layer * self._strides[0] + site * self._strides[1]
            self._add_thin(ThinParts(self._rows, at), x, out)


def additions(spans: Sequence[Span], kernels: Kernels) -> Additions:
    """The fastest way that these kernels have for these adapters."""
    pairs = [span.adapter.pairs for span in spans if span.adapter.pairs is not None]
    if kernels.add_thin is None or not pairs or len(pairs) < len(spans):
        return Additions(spans)
    return _Together(spans, np.stack(pairs, axis=2), kernels.add_thin)


def gate(additions: Additions, layer: int, gated: GatedLinear, x: Tensor, singles: int) -> Tensor:
    """The gated product of x [T, in]: adapters add to its halves, before the gate."""
    if not additions.adds(layer, GATED):
        return gated(x, singles)
    if len(x) <= FEW_TOKENS:
        halves = gated.halves(x, singles)
        additions.add(layer, GATED, x, halves)
        return gated.gate(halves, x.dtype)
    return _gate_some(additions, layer, gated, x, singles)


def _gate_some(
    additions: Additions, layer: int, gated: GatedLinear, x: Tensor, singles: int
) -> Tensor:
    """The same, with halves of the tokens between the first and the last of an adapter alone."""
    at = additions.tokens
    halves = gated.halves(x[at], min(max(singles - at.start, 0), at.stop - at.start))
    additions.inside.add(layer, GATED, x[at], halves)
    pieces = [gated.gate(halves, x.dtype)]
    if at.start:
        pieces.insert(0, gated(x[: at.start], min(singles, at.start)))
    if at.stop < len(x):
        pieces.append(gated(x[at.stop :], max(singles - at.stop, 0)))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
