"""Blocks of the paged pool as bytes: gathered for the tiers below, scattered when they come back.

On a GPU the copies run on the device's default stream, in order with the kernels of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.layout import Layout
from replica.runner.pool import KVPool


class PoolMover:
    """A `BlockMover` over one pool. Raises ValueError for a layout that is not the pool's."""

    def __init__(self, pool: KVPool, layout: Layout) -> None:
        self._kv = pool.kv
        self._layout = layout
        layers, pair, _, *block = pool.kv.shape
        if (layers, pool.kv.dtype.itemsize * pair * torch.Size(block).numel()) != (
            layout.layers,
            layout.layer_bytes,
        ):
            raise ValueError("the layout is not the pool's")
        self._shape = (pair, *block)

    def gather(self, block: int, into: memoryview) -> None:
        """Device block to a payload, the padding zero."""
        raw, values = self._views(into)
        if self._layout.stride_bytes > self._layout.layer_bytes:
            raw[:, self._layout.layer_bytes :] = 0
        values.copy_(self._kv[:, :, block])

    def scatter(self, payload: memoryview, block: int) -> None:
        """A payload to a device block."""
        self._kv[:, :, block].copy_(self._views(payload)[1])

    def _views(self, payload: memoryview) -> tuple[Tensor, Tensor]:
        """A payload as bytes [layers, stride], and as values [layers, 2, tokens, heads, dim]."""
        layout = self._layout
        raw = torch.frombuffer(payload, dtype=torch.uint8).view(layout.layers, layout.stride_bytes)
        values = raw[:, : layout.layer_bytes].view(self._kv.dtype)
        return raw, values.unflatten(1, self._shape)
