"""Paged attention in C++ on the CPU: pages are read where they lie, nothing is gathered first."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from replica.attention.base import HeadShape, PagedAttention
from replica.models.rope import RopeTable
from replica.runner.batch import ForwardBatch
from replica.runner.pool import LayerCache

_MAX_GROUP = 48
_TILE_ROWS = 16
_FLOAT, _BF16, _TILES = range(3)


class NativePagedAttention(PagedAttention):
    """float32 and bfloat16; see replica/native/attention.cpp. `tiles`: by AMX, where the
    shapes fit."""

    name = "native"

    def __init__(self, shape: HeadShape, library: ctypes.CDLL, *, tiles: bool) -> None:
        super().__init__(shape)
        self._library = library
        self._tiles = tiles and shape.group <= _TILE_ROWS

    @staticmethod
    def supports(shape: HeadShape) -> bool:
        """Whether the kernel's vectors fit these heads."""
        return shape.head_dim % 32 == 0 and shape.group <= _MAX_GROUP

    def rotate_and_store(
        self, qkv: Tensor, rope: RopeTable, cache: LayerCache, batch: ForwardBatch
    ) -> Tensor:
        shape = self.shape
        self._library.wr_rotate_and_store(
            qkv.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            qkv.shape[0],
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            int(qkv.dtype == torch.bfloat16),
        )
        query = qkv[:, : shape.heads * shape.head_dim]
        return query.unflatten(1, (shape.heads, shape.head_dim))

    def attend(self, query: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        shape = self.shape
        out = torch.empty((query.shape[0], shape.heads * shape.head_dim), dtype=query.dtype)
        self._library.wr_attend(
            query.data_ptr(),
            out.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.starts.data_ptr(),
            batch.contexts.data_ptr(),
            query.stride(0),
            batch.rows,
            batch.block_tables.shape[1],
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            cache.keys.shape[1],
            self._kind(query, cache),
        )
        return out

    def _kind(self, query: Tensor, cache: LayerCache) -> int:
        if query.dtype != torch.bfloat16:
            return _FLOAT
        return _TILES if self._tiles and cache.keys.shape[1] % _TILE_ROWS == 0 else _BF16
