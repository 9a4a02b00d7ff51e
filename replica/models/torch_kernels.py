"""The kernels in plain torch: the oracle of the native ones, and the fallback on any device.

On a CPU the weights are laid out for oneDNN ahead of time, since plain `linear` does that again on
every call; where this torch can't, plain `linear` it is.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from replica.models.blocks import BlockMatrix, Matrix, stacked
from replica.models.kernels import AddThin, Embedding, GatedLinear, Linear

log = logging.getLogger(__name__)

_ROWS_HINT = 64
"""How many input rows the layout is made for; measured to matter little from 1 to 512."""


def _prepack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, or None where that is not to be had."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        probe = torch.zeros(2, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.warning("weights are not laid out ahead of time: %s", error)
        return None
    return packed


class _Product(ABC):
    """What follows a product x @ weight.T + bias; see replica.models.kernels.Linear."""

    __slots__ = ()

    address: int | None = None

    @abstractmethod
    def __call__(self, x: Tensor, singles: int = 0) -> Tensor: ...

    def floats(self, x: Tensor, singles: int = 0) -> Tensor:
        return self(x).float()

    def add_to(self, hidden: Tensor, x: Tensor, singles: int = 0) -> None:
        hidden += self(x)


class TorchLinear(_Product):
    """Of a weight as numbers."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = _prepack(weight)
        self._weight = weight if self._packed is None else None
        self._bias = bias

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class TorchBlockLinear(_Product):
    """Of blocks, which become numbers for each product anew."""

    __slots__ = ("_bias", "_blocks")

    def __init__(self, weight: BlockMatrix, bias: Tensor | None = None) -> None:
        self._blocks = weight
        self._bias = bias

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        return linear(x, self._blocks.dense(), self._bias)


class TorchGated:
    """See replica.models.kernels.GatedLinear; `both` gives the gate beside the other factor."""

    __slots__ = ("_both",)

    def __init__(self, both: _Product) -> None:
        self._both = both

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        return self.gate(self.halves(x), x.dtype)

    def halves(self, x: Tensor, singles: int = 0) -> Tensor:
        return self._both.floats(x)

    def gate(self, halves: Tensor, dtype: torch.dtype) -> Tensor:
        gate, up = halves.chunk(2, dim=-1)
        return (silu(gate) * up).to(dtype)


class TorchEmbedding:
    """See replica.models.kernels.Embedding."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Matrix) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        weight = self._weight
        rows = weight.dense(token_ids) if isinstance(weight, BlockMatrix) else weight[token_ids]
        return rows.float()


class TorchKernels:
    """See replica.models.kernels.Kernels; works on every device. `eps` is the norms' epsilon."""

    add_thin: AddThin | None = None

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        scale = hidden.pow(2).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (hidden * scale * weight).to(dtype)

    def head_norm(self, qkv: Tensor, weight: Tensor) -> None:
        heads = qkv[:, : weight.numel()].unflatten(1, weight.shape)
        heads.copy_(self.norm(heads.float(), weight, qkv.dtype))

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        return _linear(weight, bias)

    def gated(self, gate: Matrix, up: Matrix) -> GatedLinear:
        return TorchGated(_linear(stacked((gate, up))))

    def beside(self, gate: Tensor, up: Tensor, depth: int) -> Tensor:
        return torch.cat((gate, up))

    def embedding(self, weight: Matrix) -> Embedding:
        return TorchEmbedding(weight)

    def tied(self, weight: Matrix) -> tuple[Embedding, Linear]:
        return self.embedding(weight), self.linear(weight)


def _linear(weight: Matrix, bias: Tensor | None = None) -> _Product:
    if isinstance(weight, BlockMatrix):
        return TorchBlockLinear(weight, bias)
    return TorchLinear(weight, bias)
