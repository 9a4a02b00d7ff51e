"""An adapter's tensors as the forward pass wants them: one low-rank product beside each product of
the model, fused where that is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.model.adapter import GATED_SITE, SITES, AdapterFile, LowRank, module_sizes, site_rank
from configs.model.shape import ModelShape
from replica.models.kernels import Kernels, Linear


class Delta:
    """scale * x @ down.T @ up.T for x [rows, in] in the model's dtype; beside a gated product in
    the order of its halves."""

    __slots__ = ("_down", "_rank", "_up")

    def __init__(self, down: Linear, up: Linear, rank: int) -> None:
        self._down = down
        self._up = up
        self._rank = rank

    @property
    def pair(self) -> tuple[int, int, int] | None:
        """As a row of ThinParts; None where one of the products can't be."""
        down, up = self._down.address, self._up.address
        return None if down is None or up is None else (down, up, self._rank)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out [rows, out] += the product, in place."""
        if out.dtype == torch.float32:
            self._up.add_to(out, self._down(x))
        else:
            out += self._up.floats(self._down(x))


LayerDeltas = tuple[Delta | None, ...]
"""What an adapter adds in one layer, in the order of SITES; to a gated product's two halves."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in memory. `pairs`: int64 [layers, SITES, 3] as of ThinParts; None where one of
    them can't be. `bytes`: what its tensors take."""

    name: str
    layers: tuple[LayerDeltas, ...]
    pairs: np.ndarray | None
    bytes: int


_NOTHING = (0, 0, 0)


class LoadStoppedError(Exception):
    """What was being built is not wanted any more."""


class DeltaBuilder:
    """Puts adapters of a model's shape together for its kernels, dtype and device."""

    def __init__(
        self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._sizes = module_sizes(shape)
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def build(
        self, name: str, file: AdapterFile, stopped: Callable[[], bool] = lambda: False
    ) -> AdapterWeights:
        """Raises what torch raises where there is no memory for it, and LoadStoppedError once
        `stopped`: asked before each layer."""
        taken: list[int] = []
        layers = []
        for index in range(self._shape.layers):
            if stopped():
                raise LoadStoppedError
            layers.append(self._layer(file, index, taken))
        return AdapterWeights(name, tuple(layers), _pairs(layers), sum(taken))

    def _layer(self, file: AdapterFile, index: int, taken: list[int]) -> LayerDeltas:
        deltas = []
        for site in SITES:
            pairs = [file.pair(index, module) for module in site]
            sizes = [self._sizes[module] for module in site]
            deltas.append(self._delta(pairs, sizes, taken, gated=site == GATED_SITE))
        return tuple(deltas)

    def _delta(
        self,
        pairs: Sequence[LowRank | None],
        sizes: Sequence[tuple[int, int]],
        taken: list[int],
        *,
        gated: bool,
    ) -> Delta | None:
        """Modules with the same input side by side: their ranks too, so that `up` is zero where
        one module's rank meets another one's outputs."""
        ranks = [0 if pair is None else len(pair.down) for pair in pairs]
        if not any(ranks):
            return None
        rank = site_rank(ranks)
        down = np.zeros((rank, sizes[0][0]), np.float32)
        up = np.zeros((sum(outputs for _, outputs in sizes), rank), np.float32)
        row = column = 0
        for pair, own_rank, (_, outputs) in zip(pairs, ranks, sizes, strict=True):
            if pair is not None:
                down[row : row + own_rank] = pair.down
                up[column : column + outputs, row : row + own_rank] = pair.up * pair.scale
            row, column = row + own_rank, column + outputs
        taken.append((down.size + up.size) * self._dtype.itemsize)
        wide = torch.from_numpy(up)
        if gated:
            gate, other = wide.chunk(2)
            wide = self._kernels.beside(gate, other, self._shape.hidden)
        return Delta(self._linear(torch.from_numpy(down)), self._linear(wide), rank)

    def _linear(self, weight: Tensor) -> Linear:
        return self._kernels.linear(weight.to(self._device, self._dtype))


def _pairs(layers: Sequence[LayerDeltas]) -> np.ndarray | None:
    rows = [[_NOTHING if delta is None else delta.pair for delta in deltas] for deltas in layers]
    whole = all(pair is not None for row in rows for pair in row)
    return np.array(rows, np.int64) if whole else None
