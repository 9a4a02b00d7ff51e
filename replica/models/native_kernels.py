"""The kernels in C++: norms, and products that hold the weights in panels made for vectors.

Every number is summed in one fixed order, so that a row's result does not depend on which other
rows share its batch. Where the CPU has AMX, products of bfloat16 go through its tiles.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from replica.models.kernels import GatedLinear, Linear
from replica.models.torch_kernels import TorchKernels

_PANEL = 32
_HALF = _PANEL // 2
_WRITE, _WRITE_FLOAT, _ADD_FLOAT, _GATE = range(4)
_FLOAT, _BF16, _TILES = range(3)
_TILE_DEPTH = 32


def _padded(tensor: Tensor, columns: int) -> Tensor:
    """`tensor` with zeros behind its first axis, up to a multiple of `columns`."""
    missing = -len(tensor) % columns
    if not missing:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


class _Panels:
    """Packed weights [columns, depth] and the products with them."""

    __slots__ = ("_bias", "_columns", "_depth", "_kind", "_library", "_packed")

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        columns: int,
        bias: Tensor | None = None,
        *,
        tiles: bool,
    ) -> None:
        weight = _padded(weight.contiguous(), _PANEL)
        self._library = library
        self._columns = columns
        self._depth = weight.shape[1]
        is_bf16 = weight.dtype == torch.bfloat16
        tiles = tiles and self._depth % _TILE_DEPTH == 0
        self._kind = (_TILES if tiles else _BF16) if is_bf16 else _FLOAT
        self._packed = torch.empty_like(weight)
        library.wr_pack(
            weight.data_ptr(), self._packed.data_ptr(), len(weight), self._depth, int(is_bf16)
        )
        self._bias = None if bias is None else _padded(bias.float(), _PANEL)

    def fresh(self, x: Tensor, dtype: torch.dtype, then: int) -> Tensor:
        out = torch.empty((len(x), self._columns), dtype=dtype)
        self.into(out, x, then)
        return out

    def into(self, out: Tensor, x: Tensor, then: int) -> None:
        self._library.wr_product(
            x.data_ptr(),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            len(x),
            self._columns,
            self._depth,
            then,
            self._kind,
        )


class NativeLinear:
    """See replica.models.kernels.Linear."""

    __slots__ = ("_panels",)

    def __init__(self, panels: _Panels) -> None:
        self._panels = panels

    def __call__(self, x: Tensor) -> Tensor:
        return self._panels.fresh(x, x.dtype, _WRITE)

    def floats(self, x: Tensor) -> Tensor:
        return self._panels.fresh(x, torch.float32, _WRITE_FLOAT)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        self._panels.into(hidden, x, _ADD_FLOAT)


class NativeGated:
    """See replica.models.kernels.GatedLinear; a panel holds 16 columns of either half."""

    __slots__ = ("_panels",)

    def __init__(self, panels: _Panels) -> None:
        self._panels = panels

    def __call__(self, x: Tensor) -> Tensor:
        return self._panels.fresh(x, x.dtype, _GATE)


class NativeKernels(TorchKernels):
    """See replica.models.kernels.Kernels. `tiles`: use AMX, which `library.wr_tiles()` allows."""

    def __init__(self, library: ctypes.CDLL, eps: float, *, tiles: bool) -> None:
        super().__init__(eps)
        self._library = library
        self._tiles = tiles

    def norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if hidden.dim() != 2 or hidden.shape[1] % _HALF:
            return super().norm(hidden, weight, dtype)
        out = torch.empty(hidden.shape, dtype=dtype)
        self._library.wr_norm(
            hidden.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *hidden.shape,
            self._eps,
            int(dtype == torch.bfloat16),
        )
        return out

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if weight.shape[1] % 2:
            return super().linear(weight, bias)
        return NativeLinear(self._panels(weight, len(weight), bias))

    def gated(self, gate: Tensor, up: Tensor) -> GatedLinear:
        if gate.shape[1] % 2:
            return super().gated(gate, up)
        halves = (_padded(each, _HALF).unflatten(0, (-1, _HALF)) for each in (gate, up))
        mixed = torch.cat(tuple(halves), dim=1).flatten(0, 1)
        return NativeGated(self._panels(mixed, len(gate)))

    def _panels(self, weight: Tensor, columns: int, bias: Tensor | None = None) -> _Panels:
        return _Panels(self._library, weight, columns, bias, tiles=self._tiles)
