"""What a model needs beside attention, as an interface: norms, and products with constant weights.

The residual stream ("hidden") is float32; what enters a product is in the model's dtype.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from replica.models.blocks import Matrix


class Linear(Protocol):
    """x @ weight.T + bias for weight [out, in]; x is [rows, in] in the model's dtype. `address`:
    where its weights lie as AddThin takes them; None where it can't.

    `singles`: so many leading rows are requests' only tokens. They may be computed in a way of
    their own, and so may the others, but nobody otherwise for the sake of somebody else.
    """

    address: int | None

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        """[rows, out] in the model's dtype."""

    def floats(self, x: Tensor, singles: int = 0) -> Tensor:
        """[rows, out] in float32."""

    def add_to(self, hidden: Tensor, x: Tensor, singles: int = 0) -> None:
        """hidden (float32 [rows, out]) += the product, in place; the bias is left out."""


class GatedLinear(Protocol):
    """silu(x @ gate.T) * (x @ up.T) for gate and up [out, in]; x and `singles` as of Linear."""

    def __call__(self, x: Tensor, singles: int = 0) -> Tensor:
        """[rows, out] in the model's dtype."""

    def halves(self, x: Tensor, singles: int = 0) -> Tensor:
        """The two products before the gate, in an order of its own: float32 [rows, width]."""

    def gate(self, halves: Tensor, dtype: torch.dtype) -> Tensor:
        """What becomes of `halves`: [rows, out]."""


class Embedding(Protocol):
    """Rows of a weight [vocab, size], each by its token."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """float32 [T, size], of numbers in the model's dtype."""


class ThinParts(NamedTuple):
    """Rows of a batch, each part with two matrices of its own [rank, in] and [out, rank].

    `rows`: int64 [parts, 2], first and behind the last; in order, none twice. `pairs`: the address
    of int64 [parts, 3], the matrices' addresses and the rank, 0 for nothing.
    """

    rows: np.ndarray
    pairs: int


class AddThin(Protocol):
    """Adds what all parts make of their rows of x [rows, in] to out [rows, out], in place."""

    def __call__(self, parts: ThinParts, x: Tensor, out: Tensor) -> None: ...


class Kernels(Protocol):
    """One implementation for one device. `add_thin`: None where there is none."""

    add_thin: AddThin | None

    def norm(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Root-mean-square norm of hidden (float32 [..., size]) times weight (float32)."""

    def head_norm(self, qkv: Tensor, weight: Tensor) -> None:
        """Norm each of the leading heads of qkv [T, packed] in place; weight is [heads, dim]."""

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """Prepare constant weights once; the tensors given are not kept where they are not used."""

    def gated(self, gate: Matrix, up: Matrix) -> GatedLinear:
        """Prepare the two halves of a gated product, both of one kind."""

    def beside(self, gate: Tensor, up: Tensor, depth: int) -> Tensor:
        """Rows [out, any] that go with the outputs of a gated product of that depth, in the order
        of its `halves`: [width, any]."""

    def embedding(self, weight: Matrix) -> Embedding:
        """Prepare the weight that tokens are looked up in."""

    def tied(self, weight: Matrix) -> tuple[Embedding, Linear]:
        """An embedding, and the head that has the same weight."""
