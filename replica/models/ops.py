"""The small operations between the matrix products, in plain torch: the oracle of the native ones.

The residual stream is float32; what enters a matrix product is in the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu


class Ops(Protocol):
    """What a layer needs beside matrix products and attention."""

    def norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Root-mean-square norm of hidden (float32 [T, D]) times weight (float32 [D])."""

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """hidden += delta, in place; then the norm of it, in the dtype of `delta`."""

    def head_norm(self, qkv: Tensor, weight: Tensor) -> None:
        """Norm each of the leading heads of qkv [T, packed] in place; weight is [heads, dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) * right half of the last axis, computed in float32."""


class TorchOps:
    """Works on every device. `eps` is the norms' epsilon."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        scale = hidden.pow(2).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (hidden * scale * weight).to(dtype)

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        hidden += delta
        return self.norm(hidden, weight, delta.dtype)

    def head_norm(self, qkv: Tensor, weight: Tensor) -> None:
        heads = qkv[:, : weight.numel()].unflatten(1, weight.shape)
        heads.copy_(self.norm(heads.float(), weight, qkv.dtype))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (silu(gate) * up).to(gate_up.dtype)
