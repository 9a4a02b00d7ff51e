"""The paged KV pool: the only place where KV lives on the device.

One tensor, [layers, 2, blocks + 1, block_tokens, kv_heads, head_dim]: keys, then values. The last
block is the dump: padding reads and writes go there and nowhere else. Who owns which block is the
scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [blocks + 1, block_tokens, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


_LINE_BYTES = 64


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their memory is not touched before it is used, and begins with a cache line:
    a vector, or a row of a tile, that lies across two lines costs as much as two."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _LINE_BYTES, np.uint8)
    first = -raw.ctypes.data % _LINE_BYTES
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)


class KVPool:
    """`blocks` usable blocks plus the dump, for every layer."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.dump = blocks
        shape = (layers, 2, blocks + 1, block_tokens, kv_heads, head_dim)
        self.kv = _zeros(shape, dtype, device)
        self.layers = tuple(LayerCache(layer[0], layer[1]) for layer in self.kv)
