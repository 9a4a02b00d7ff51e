"""What an attention backend is: rotate, store, attend, over the paged pool.

A backend may not let a row see anything but the first `contexts` positions of its own block table,
nor let stale numbers (NaN included) behind them reach a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from replica.models.rope import RopeTable
from replica.runner.batch import ForwardBatch
from replica.runner.pool import LayerCache


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, key/value heads, size of a head; `kv_heads` divides `heads`."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def packed(self) -> int:
        """Width of one token's query, key and value, side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class PagedAttention(ABC):
    """One implementation for one device and dtype. Stateless but for scratch memory."""

    name: str

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape

    @abstractmethod
    def rotate_and_store(
        self, qkv: Tensor, rope: RopeTable, cache: LayerCache, batch: ForwardBatch
    ) -> Tensor:
        """Rotate queries and keys of qkv [T, packed]; write keys and values to their slots.

        Gives the queries [T, heads, head_dim], maybe as a view of `qkv`, which it may overwrite.
        """

    @abstractmethod
    def attend(self, query: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """Causal attention of query [T, heads, head_dim] over each row's own context.

        The row's last query stands at position contexts - 1. Gives [T, heads * head_dim].
        """
