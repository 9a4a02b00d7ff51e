"""The kernels in C++: norms, and products that hold the weights in panels made for vectors.

Every number is summed in one fixed order, so that a row's result does not depend on which other
rows share its batch. Where the CPU has AMX, products of bfloat16 go through its tiles. Weights
that are kept as blocks become numbers in the cache, panel by panel, and give the same bits; but for
the `singles` in bfloat16 the tiles multiply the whole numbers of blocks, and no weight is rounded.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from replica.models.blocks import BlockMatrix, Matrix, depth_of, of_rows, rows_of
from replica.models.kernels import Embedding, GatedLinear, Linear, ThinParts
from replica.models.room import Room
from replica.models.torch_kernels import TorchKernels

_PANEL = 32
_HALF = _PANEL // 2
_WRITE, _WRITE_FLOAT, _ADD_FLOAT, _GATE = range(4)
_FLOAT, _BF16, _TILES = range(3)
_TILE_DEPTH = 32
_DENSE = 0
_ENCODINGS = {"Q4_1": 1, "Q8_0": 2}


def _padded(tensor: Tensor, columns: int) -> Tensor:
    """`tensor` with zeros behind its first axis, up to a multiple of `columns`."""
    missing = -len(tensor) % columns
    if not missing:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def _mixed(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both by turns, 16 of each, so that a panel holds what belongs together."""
    halves = [_padded(each, _HALF).unflatten(0, (-1, _HALF)) for each in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 1)


class _Panels:
    """Packed weights [columns, depth] and the products with them."""

    __slots__ = ("_bias", "_columns", "_depth", "_encoding", "_kind", "_library", "_packed")

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Matrix,
        columns: int,
        bias: Tensor | None = None,
        *,
        room: Room,
        tiles: bool,
    ) -> None:
        self._library = library
        self._columns = columns
        self._depth = depth_of(weight)
        is_bf16 = weight.dtype == torch.bfloat16
        tiles = tiles and self._depth % _TILE_DEPTH == 0
        self._kind = (_TILES if tiles else _BF16) if is_bf16 else _FLOAT
        self._encoding = _ENCODINGS[weight.encoding] if isinstance(weight, BlockMatrix) else _DENSE
        self._packed = self._pack(_padded(rows_of(weight).contiguous(), _PANEL), room, is_bf16)
        self._bias = None if bias is None else _padded(bias.float(), _PANEL)

    def _pack(self, rows: Tensor, room: Room, is_bf16: bool) -> Tensor:
        """As large as `rows`, in the order of the panels."""
        packed = room.zeros_like(rows)
        size = rows.data_ptr(), packed.data_ptr(), len(rows), self._depth
        if self._encoding == _DENSE:
            self._library.wr_pack(*size, is_bf16)
        else:
            self._library.wr_pack_blocks(*size, self._encoding, is_bf16)
        return packed

    @property
    def address(self) -> int | None:
        """Where dense ones lie."""
        return self._packed.data_ptr() if self._encoding == _DENSE else None

    def columns(self, ids: Tensor) -> Tensor:
        """float32 [ids, depth] of weights kept as blocks; `ids` are int64."""
        out = torch.empty((len(ids), self._depth))
        self._library.wr_columns(
            self._packed.data_ptr(),
            ids.contiguous().data_ptr(),
            out.data_ptr(),
            len(ids),
            self._depth,
            self._encoding,
            int(self._kind != _FLOAT),
        )
        return out

    def fresh(self, x: Tensor, dtype: torch.dtype, then: int, singles: int) -> Tensor:
        out = torch.empty((x.shape[0], self._columns), dtype=dtype)
        self.into(out, x, then, singles)
        return out

    def whole(self, x: Tensor, singles: int) -> Tensor:
        """float32 [rows, packed columns]: the padding too."""
        out = torch.empty((x.shape[0], len(self._packed)))
        self.into(out, x, _WRITE_FLOAT, singles)
        return out

    def into(self, out: Tensor, x: Tensor, then: int, singles: int) -> None:
        self._library.wr_product(
            x.data_ptr(),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            singles,
            out.shape[1],
            self._depth,
            then,
            self._kind,
            self._encoding,
        )


class NativeLinear:
    """See replica.models.kernels.Linear."""

    __slots__ = ("_panels",)

    def __init__(self, panels: _Panels) -> None:
        self._panels = panels

    @property
    def address(self) -> int | None:
        return self._panels.address

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        return self._panels.fresh(x, x.dtype, _WRITE, singles)

    def floats(self, x: Tensor, singles: int = 0) -> Tensor:
        return self._panels.fresh(x, torch.float32, _WRITE_FLOAT, singles)

    def add_to(self, hidden: Tensor, x: Tensor, singles: int = 0) -> None:
        self._panels.into(hidden, x, _ADD_FLOAT, singles)


class NativeGated:
    """See replica.models.kernels.GatedLinear; a panel holds 16 columns of either half."""

    __slots__ = ("_columns", "_library", "_panels")

    def __init__(self, library: ctypes.CDLL, panels: _Panels, columns: int) -> None:
        self._library = library
        self._panels = panels
        self._columns = columns

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        return self._panels.fresh(x, x.dtype, _GATE, singles)

    def halves(self, x: Tensor, singles: int = 0) -> Tensor:
        return self._panels.whole(x, singles)

    def gate(self, halves: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty((len(halves), self._columns), dtype=dtype)
        self._library.wr_gate(
            halves.data_ptr(), out.data_ptr(), *out.shape, halves.shape[1], dtype == torch.bfloat16
        )
        return out


class NativeEmbedding:
    """See replica.models.kernels.Embedding, for weights kept as blocks."""

    __slots__ = ("_panels",)

    def __init__(self, panels: _Panels) -> None:
        self._panels = panels

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._panels.columns(token_ids)


class NativeKernels(TorchKernels):
    """See replica.models.kernels.Kernels. `tiles`: use AMX, which `library.wr_tiles()` allows."""

    def __init__(self, library: ctypes.CDLL, eps: float, *, tiles: bool) -> None:
        super().__init__(eps)
        self._library = library
        self._tiles = tiles
        self._room = Room()

    def add_thin(self, parts: ThinParts, x: Tensor, out: Tensor) -> None:
        kind = (_TILES if self._tiles else _BF16) if x.dtype == torch.bfloat16 else _FLOAT
        self._library.wr_add_thin(
            x.data_ptr(),
            out.data_ptr(),
            parts.rows.ctypes.data,
            parts.pairs,
            len(parts.rows),
            x.shape[1],
            out.shape[1],
            out.dtype == torch.float32,
            kind,
        )

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

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if depth_of(weight) % 2:
            return super().linear(weight, bias)
        return NativeLinear(self._panels(weight, len(rows_of(weight)), bias))

    def gated(self, gate: Matrix, up: Matrix) -> GatedLinear:
        if depth_of(gate) % 2:
            return super().gated(gate, up)
        mixed = of_rows(gate, _mixed(rows_of(gate), rows_of(up)))
        columns = len(rows_of(gate))
        return NativeGated(self._library, self._panels(mixed, columns), columns)

    def beside(self, gate: Tensor, up: Tensor, depth: int) -> Tensor:
        return super().beside(gate, up, depth) if depth % 2 else _mixed(gate, up)

    def embedding(self, weight: Matrix) -> Embedding:
        if not isinstance(weight, BlockMatrix):
            return super().embedding(weight)
        return NativeEmbedding(self._panels(weight, len(weight.data)))

    def tied(self, weight: Matrix) -> tuple[Embedding, Linear]:
        if not isinstance(weight, BlockMatrix):
            return super().tied(weight)
        panels = self._panels(weight, len(weight.data))
        return NativeEmbedding(panels), NativeLinear(panels)

    def _panels(self, weight: Matrix, columns: int, bias: Tensor | None = None) -> _Panels:
        return _Panels(self._library, weight, columns, bias, room=self._room, tiles=self._tiles)
