"""The kernels in C++: norms, and products that hold the weights in panels made for vectors.

Every number is summed in one fixed order, so that a row's result does not depend on which other
rows share its batch. Where the CPU has AMX, many rows at once go to oneDNN, which uses it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from replica.models.kernels import GatedLinear, Linear
from replica.models.torch_kernels import TorchKernels, TorchLinear

_PANEL = 32
_HALF = _PANEL // 2
_WRITE, _WRITE_FLOAT, _ADD_FLOAT, _GATE = range(4)
_ONEDNN_ROWS = 32
"""From how many rows on oneDNN is used where there is AMX."""


def _padded(tensor: Tensor, columns: int) -> Tensor:
    """`tensor` with zeros behind its first axis, up to a multiple of `columns`."""
    missing = -len(tensor) % columns
    if not missing:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


class _Panels:
    """Packed weights [columns, depth] and the products with them."""

    __slots__ = ("_bias", "_columns", "_depth", "_is_bf16", "_library", "_packed")

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, columns: int, bias: Tensor | None = None
    ) -> None:
        weight = _padded(weight.contiguous(), _PANEL)
        self._library = library
        self._columns = columns
        self._depth = weight.shape[1]
        self._is_bf16 = int(weight.dtype == torch.bfloat16)
        self._packed = torch.empty_like(weight)
        library.wr_pack(
            weight.data_ptr(), self._packed.data_ptr(), len(weight), self._depth, self._is_bf16
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
            self._is_bf16,
        )


class NativeLinear:
    """See replica.models.kernels.Linear. `wide` takes over where there are many rows."""

    __slots__ = ("_panels", "_wide")

    def __init__(self, panels: _Panels, wide: TorchLinear | None) -> None:
        self._panels = panels
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide is not None and len(x) >= _ONEDNN_ROWS:
            return self._wide(x)
        return self._panels.fresh(x, x.dtype, _WRITE)

    def floats(self, x: Tensor) -> Tensor:
        return self._panels.fresh(x, torch.float32, _WRITE_FLOAT)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        if self._wide is not None and len(x) >= _ONEDNN_ROWS:
            self._wide.add_to(hidden, x)
        else:
            self._panels.into(hidden, x, _ADD_FLOAT)


class _WideGated:
    """Both halves in one oneDNN product, then the gate."""

    __slots__ = ("_both", "_library")

    def __init__(self, library: ctypes.CDLL, gate: Tensor, up: Tensor) -> None:
        self._library = library
        self._both = TorchLinear(torch.cat((gate, up)))

    def __call__(self, x: Tensor) -> Tensor:
        both = self._both(x)
        out = torch.empty((len(x), both.shape[1] // 2), dtype=x.dtype)
        self._library.wr_silu_mul(
            both.data_ptr(), out.data_ptr(), *out.shape, int(x.dtype == torch.bfloat16)
        )
        return out


class NativeGated:
    """See replica.models.kernels.GatedLinear; a panel holds 16 columns of either half."""

    __slots__ = ("_panels", "_wide")

    def __init__(self, panels: _Panels, wide: _WideGated | None) -> None:
        self._panels = panels
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide is not None and len(x) >= _ONEDNN_ROWS:
            return self._wide(x)
        return self._panels.fresh(x, x.dtype, _GATE)


class NativeKernels(TorchKernels):
    """See replica.models.kernels.Kernels. `amx`: let oneDNN have the products of many rows."""

    def __init__(self, library: ctypes.CDLL, eps: float, *, amx: bool) -> None:
        super().__init__(eps)
        self._library = library
        self._amx = amx

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
        wide = TorchLinear(weight, bias) if self._wide(weight) else None
        return NativeLinear(_Panels(self._library, weight, len(weight), bias), wide)

    def gated(self, gate: Tensor, up: Tensor) -> GatedLinear:
        if gate.shape[1] % 2:
            return super().gated(gate, up)
        halves = (_padded(each, _HALF).unflatten(0, (-1, _HALF)) for each in (gate, up))
        mixed = torch.cat(tuple(halves), dim=1).flatten(0, 1)
        fits = self._wide(gate) and len(gate) % _HALF == 0
        wide = _WideGated(self._library, gate, up) if fits else None
        return NativeGated(_Panels(self._library, mixed, len(gate)), wide)

    def _wide(self, weight: Tensor) -> bool:
        return self._amx and weight.dtype == torch.bfloat16
