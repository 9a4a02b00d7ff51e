"""A matrix as the blocks of its file: what is kept of 4-bit weights, and what they stand for.

The blocks are the file's bytes, never encoded anew. Plain torch here is the oracle of the native
kernels, and what runs on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 32
"""Weights of one block."""


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as a float32 column."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _q4_1(blocks: Tensor) -> Tensor:
    nibbles = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), dim=1)
    return nibbles * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8) * _halves(blocks, 0)


DECODERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
}
"""By the encoding's name: bytes of a block, and uint8 [blocks, bytes] to float32 [blocks, 32]."""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """`data`: uint8 [rows, bytes of a row]. `dtype`: that of the numbers it stands for."""

    data: Tensor
    encoding: str
    dtype: torch.dtype

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.data.shape[1] // DECODERS[self.encoding][0] * BLOCK

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """[rows, columns] of all rows or of those, in `dtype`."""
        data = self.data if rows is None else self.data[rows]
        size, decode = DECODERS[self.encoding]
        return decode(data.reshape(-1, size)).view(len(data), self.columns).to(self.dtype)


Matrix = Tensor | BlockMatrix
"""Weights [rows, columns], as numbers or as blocks."""


def rows_of(matrix: Matrix) -> Tensor:
    """What lies in memory, [rows, whatever a row is]."""
    return matrix.data if isinstance(matrix, BlockMatrix) else matrix


def of_rows(like: Matrix, rows: Tensor) -> Matrix:
    """A matrix of the same kind with these rows."""
    return replace(like, data=rows) if isinstance(like, BlockMatrix) else rows


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """Matrices of one kind, one below the other."""
    return of_rows(parts[0], torch.cat([rows_of(part) for part in parts]))


def depth_of(matrix: Matrix) -> int:
    """How many numbers a row has."""
    return matrix.columns if isinstance(matrix, BlockMatrix) else matrix.shape[1]
